"""How a cell is timed, by kind of device, and what comes out of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from granikv_sglang.backends.cascade_plan import CascadeCapacity
from granikv_sglang.calibrate.cells import MAX_ROWS, Cell, Layout
from granikv_sglang.core import GraniKVError, Regime
from granikv_sglang.plan.fit import Point


@dataclass(frozen=True)
class Timing:
    """One cell under one regime: microseconds of a layer, and the least and greatest of ``repeats``.

    ``us`` is the median on a GPU and the least on a CPU.
    """

    cell: Cell
    regime: Regime
    us: float
    least: float
    most: float
    repeats: int

    def to_json(self) -> dict[str, Any]:
        row = {"regime": self.regime.value, "us": round(self.us, 3), "least": round(self.least, 3)}
        return {"cell": self.cell.to_json(), **row, "most": round(self.most, 3), "repeats": self.repeats}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Timing:
        """Raises KeyError or ValueError where a field is missing or unknown."""
        us, least, most = (float(value[name]) for name in ("us", "least", "most"))
        cell, regime = Cell.from_json(value["cell"]), Regime(value["regime"])
        return Timing(cell, regime, us, least, most, int(value["repeats"]))


class Meter(Protocol):
    """Times cells on one device. :meth:`open` sets up a head layout and frees what the last one held."""

    same_engine: bool
    """Both shared regimes are one engine: timing it once is enough."""

    def open(self, layout: Layout, cells: Sequence[Cell]) -> None:
        """Get ready for ``cells``, all of ``layout``."""
        ...

    def time(self, cell: Cell, regime: Regime) -> Timing: ...


def regimes_of(cell: Cell, meter: Meter) -> tuple[Regime, ...]:
    """What to time: what an engine can hold. Without a shared stretch only the Triton engine has a pass of its own, and
    reads all as tails.
    """
    if cell.members == 1 and meter.same_engine:
        return (Regime.UNIFORM,)
    if cell.members == 1 or meter.same_engine:
        return (Regime.UNIFORM, Regime.BATCHED_GEMM)
    if not CascadeCapacity.of(MAX_ROWS).holds(cell.rows, cell.items):
        return (Regime.UNIFORM, Regime.BATCHED_GEMM)
    return tuple(Regime)


class Lines:
    """Raw timings in a file of JSON lines, one a timing, flushed at once: a run that ends early loses nothing.

    Lines of other kinds and a last line cut off in the middle are passed over.

    Args:
        path: the file; None keeps timings in memory only.
        about: added to every line: the device, versions, commit.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        self._path = path
        self._about = dict(about)
        self.timings: list[Timing] = read_timings(path, str(about["device"])) if path is not None else []
        self._done = {(t.cell, t.regime) for t in self.timings}

    def has(self, cell: Cell, regime: Regime) -> bool:
        return (cell, regime) in self._done

    def add(self, timing: Timing) -> None:
        self.timings.append(timing)
        self._done.add((timing.cell, timing.regime))
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"kind": "timing", **self._about, **timing.to_json()}) + "\n")


def read_timings(path: Path, device: str | None = None) -> list[Timing]:
    """Timings of a file, those of ``device`` only where it is given. A file that is not there has none."""
    if not path.exists():
        return []
    found = []
    for row in read_rows(path):
        if row.get("kind") == "timing" and device in (None, row.get("device")):
            found.append(Timing.from_json(row))
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines. Raises GraniKVError for a broken line that is not the last."""
    rows, lines = [], path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise GraniKVError(f"{path} line {number} is not JSON; remove that line") from error
    return rows


def points_of(timings: Iterable[Timing], same_engine: bool = False) -> list[tuple[Cell, Point]]:
    """One point a cell. With one engine for both shared regimes, its time is that of both."""
    by_cell: dict[Cell, dict[Regime, float]] = {}
    for timing in timings:
        by_cell.setdefault(timing.cell, {})[timing.regime] = timing.us
    points = []
    for cell, us in by_cell.items():
        if same_engine and Regime.BATCHED_GEMM in us:
            us[Regime.CASCADE] = us[Regime.BATCHED_GEMM]
        points.append((cell, Point(cell.features(), us)))
    return points


def as_json(value: Any) -> dict[str, Any]:
    """A dataclass with enum keys as JSON-ready values."""
    plain = dataclasses.asdict(value)
    return {k: {str(r): n for r, n in v.items()} if isinstance(v, dict) else v for k, v in plain.items()}
