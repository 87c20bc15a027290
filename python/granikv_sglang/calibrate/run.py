"""A calibration from start to file: measure within a budget, fit, check on points that the fit has not seen, write."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from granikv_sglang import __version__
from granikv_sglang.calibrate.cells import Cell, split
from granikv_sglang.calibrate.meter import Lines, Meter, as_json, points_of, regimes_of
from granikv_sglang.core import GraniKVError, Regime, commit
from granikv_sglang.plan import Constants, Kind
from granikv_sglang.plan.fit import Point, Regret, Residuals, errors, fit, regret
from granikv_sglang.plan.table import Device, save

LEAST_CELLS = 12
"""Fewer measured cells than this are no calibration."""


@dataclass(frozen=True)
class Result:
    """A finished calibration: constants of all points, and how the constants of three quarters did on the rest.

    ``residuals`` is relative errors of predictions by regime, ``regret`` is of the choices; both on held-out cells.
    """

    constants: Constants
    fitted: int
    checked: int
    residuals: dict[Regime, Residuals]
    regret: Regret


def measure(cells: Sequence[Cell], meter: Meter, lines: Lines, seconds: float, show: bool = True) -> bool:
    """Time what ``lines`` does not have yet, layout by layout; whether all was timed before ``seconds`` were over.

    Every layout gets an equal share of what time is left.
    """
    layouts = list(dict.fromkeys(cell.layout for cell in cells))
    todo = [(c, r) for c in cells for r in regimes_of(c, meter) if not lines.has(c, r)]
    ends, complete = time.monotonic() + seconds, True
    with tqdm(total=len(todo), unit="timing", disable=not show, dynamic_ncols=True) as bar:
        for i, layout in enumerate(layouts):
            own = [c for c in cells if c.layout == layout and any(not lines.has(c, r) for r in regimes_of(c, meter))]
            if not own:
                continue
            bar.set_description(f"heads {layout.name}")
            meter.open(layout, own)
            until = time.monotonic() + max(0.0, ends - time.monotonic()) / (len(layouts) - i)
            for cell in own:
                if time.monotonic() >= until:
                    complete = False
                    break
                for regime in regimes_of(cell, meter):
                    if not lines.has(cell, regime):
                        lines.add(meter.time(cell, regime))
                        bar.update()
    return complete


def calibrate(lines: Lines, device: Device) -> Result:
    """Fit and check. Raises GraniKVError where too little was measured."""
    both = device.machine.kind is Kind.CPU
    points = dict(points_of(lines.timings, same_engine=both))
    if len(points) < LEAST_CELLS:
        raise GraniKVError(f"{len(points)} cells were timed, at least {LEAST_CELLS} are needed; give more --seconds")
    fit_on, check_on = split(list(points))
    partial = fit([points[c] for c in fit_on], device.machine)
    held_out: list[Point] = [points[c] for c in check_on]
    residuals = {r: Residuals.of(errors(held_out, partial, r)) for r in Regime}
    judged = regret(held_out, partial)
    # What is used is fitted on everything: more points can only help, and the check above was of the worse fit.
    constants = fit(list(points.values()), device.machine)
    if both:
        constants = dataclasses.replace(constants, regimes=(Regime.CASCADE, Regime.BATCHED_GEMM))
    return Result(constants, len(fit_on), len(check_on), residuals, judged)


def provenance(device: Device, result: Result, seconds: float, driver: str) -> dict[str, Any]:
    """What a calibration has to be read with."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "granikv": __version__,
        "commit": commit(),
        "driver": driver,
        "seconds": round(seconds, 1),
        "cells_fitted": result.fitted,
        "cells_checked": result.checked,
        "residuals": {r.value: _rounded(dataclasses.asdict(x)) for r, x in result.residuals.items()},
        "regret": _rounded(as_json(result.regret)),
    }


def _rounded(value: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in value.items()}


def write(path: Path, device: Device, result: Result, about: dict[str, Any]) -> None:
    """Raises GraniKVError where the file cannot be written."""
    try:
        save(path, device, result.constants, about)
    except OSError as error:
        raise GraniKVError(f"cannot write {path}: {error.strerror}; name another file with --out") from error


def summary(result: Result) -> list[str]:
    """Lines for people."""
    lines = [f"fitted on {result.fitted} cells, checked on {result.checked} others:"]
    for regime, r in result.residuals.items():
        if r.points:
            lines.append(f"  {regime.value:13s} error of predictions: median {r.median:.1%}, 95% below {r.p95:.1%}")
    j, c = result.regret, result.constants
    lines.append(f"  choices: median {j.median:.1%}, 95% below {j.p95:.1%} off the best, worst {j.worst:.1%}")
    lines.append(f"  slower than UNIFORM by at most {j.slower:.1%}; margins {c.margin:.0%} and {c.plain_margin:.0%}")
    return lines


def driver() -> str:
    """Version of the NVIDIA driver; empty without one."""
    if not shutil.which("nvidia-smi"):
        return ""
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return asked.stdout.splitlines()[0].strip() if asked.returncode == 0 and asked.stdout else ""
