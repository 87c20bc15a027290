"""The classifier's examination: every regime timed in a grid of cells, and the choice's time against the best.

Usage, on a GPU:   PYTHONPATH=python:kernels python benchmark/regret.py RAW.jsonl [--seconds 240] [--table FILE]
Anywhere:          PYTHONPATH=python:kernels python benchmark/regret.py RAW.jsonl --judge-only [--table FILE]

295 cells: members 1 to 128, prefixes of 512 to 32K tokens, 1 to 16 groups, heads 32/8, 40/8, 8/1 and 9/3, tails of 64
to 4K. Each is one attention layer in a CUDA graph, K and V out of L2 before each replay. Timings are lines of RAW,
written at once: the same command again continues, and ``calibrate --fit-only`` fits them. Choices are the
classifier's first ones, without what it would hold. ``--table``: the calibration to judge; default: what a server would
use. Prints one line for people; ``benchmark/regret_plot.py`` draws.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from granikv_sglang.calibrate.cells import Cell, regret_grid
from granikv_sglang.calibrate.meter import Lines, points_of, read_timings
from granikv_sglang.calibrate.offline import device_in
from granikv_sglang.core import GraniKVError, Regime, cache_root
from granikv_sglang.plan import Classifier, Constants
from granikv_sglang.plan.fit import Point, Regret, measured_regimes, regret
from granikv_sglang.plan.table import Device, find, load

TARGET = {"median": 0.01, "p95": 0.08, "slower": 0.02}
"""What must hold on one H200 over at least 200 cells."""
CELLS = 200


def judged(cell: Cell, point: Point, constants: Constants) -> dict[str, Any]:
    """One cell with what was chosen, what was best, and what was predicted."""
    decision = Classifier(constants).classify(point.features, None, measured_regimes(point, constants))
    best = min(point.us, key=lambda regime: point.us[regime])
    taken = point.us[decision.regime]
    return {
        "cell": cell.to_json(),
        "chosen": decision.regime.value,
        "reason": decision.reason.value,
        "bound": decision.bound.value,
        "best": best.value,
        "regret": taken / point.us[best] - 1,
        "over_uniform": taken / point.us[Regime.UNIFORM] - 1,
        "us": {regime.value: us for regime, us in point.us.items()},
        "predicted_us": {regime.value: us for regime, us in decision.predicted_us},
    }


def complete(points: Sequence[tuple[Cell, Point]]) -> list[tuple[Cell, Point]]:
    """Cells of the grid with UNIFORM and another regime timed."""
    grid = set(regret_grid())
    return [(c, p) for c, p in points if c in grid and Regime.UNIFORM in p.us and len(p.us) > 1]


def report(result: Regret) -> str:
    """The line for people: numbers, targets, and whether each is met."""
    met = {
        "median": result.median <= TARGET["median"],
        "p95": result.p95 <= TARGET["p95"],
        "slower": result.slower <= TARGET["slower"],
    }
    words = {"median": "median regret", "p95": "95% below", "slower": "slower than UNIFORM by at most"}
    parts = [
        f"{words[k]} {getattr(result, k):.2%} (target {TARGET[k]:.0%}: {'met' if met[k] else 'MISSED'})" for k in TARGET
    ]
    return f"{result.cells} cells (target {CELLS}); " + "; ".join(parts) + f"; worst {result.worst:.1%}"


def measure(path: Path, seconds: float) -> Device:
    """Time what the file lacks; returns the device."""
    # Only this one needs torch, CUDA and FlashInfer.
    from granikv_sglang.calibrate.__main__ import about_of, warm_up  # noqa: PLC0415
    from granikv_sglang.calibrate.cells import GPU_LAYOUTS  # noqa: PLC0415
    from granikv_sglang.calibrate.cuda import CudaMeter  # noqa: PLC0415
    from granikv_sglang.calibrate.run import measure as run  # noqa: PLC0415
    from granikv_sglang.plugin.engines import device_of  # noqa: PLC0415

    began = time.monotonic()
    device = device_of(cuda=True)
    warm_up(GPU_LAYOUTS)
    lines = Lines(path, about_of(device))
    left = max(10.0, seconds - (time.monotonic() - began))
    if not run(regret_grid(), CudaMeter(), lines, left):
        print("time is up: run the same command again to continue", flush=True)
    return device


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, help="JSON lines of raw timings; continued where it exists")
    parser.add_argument("--table", type=Path, help="calibration to judge")
    parser.add_argument("--judge-only", action="store_true", help="measure nothing")
    parser.add_argument("--seconds", type=float, default=240, help="for everything, compilation included (default 240)")
    parser.add_argument("--out", type=Path, help="judged cells as JSON lines (overwritten)")
    args = parser.parse_args(argv)
    try:
        device = device_in(args.raw)[0] if args.judge_only else measure(args.raw, args.seconds)
        if args.table is not None:
            constants, source = load(args.table, device)[0], str(args.table)
        else:
            found = find(device, cache_root())
            constants, source = found.constants, found.line
    except GraniKVError as error:
        print(f"granikv: {error}", file=sys.stderr)
        return 2
    points = complete(points_of(read_timings(args.raw, device.name)))
    rows = [judged(cell, point, constants) for cell, point in points]
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"kind": "judged", "device": device.name, "table": source}
        args.out.write_text("".join(json.dumps(about | row) + "\n" for row in rows))
    print(f"constants: {source}")
    for row in sorted(rows, key=lambda r: -r["regret"])[:8]:
        cell = Cell.from_json(row["cell"])
        times = ", ".join(f"{r} {us:.1f} ({row['predicted_us'].get(r, 0):.1f})" for r, us in row["us"].items())
        print(
            f"  {row['regret']:7.1%} {cell.layout.name:>9s} {cell.groups:2d} x {cell.members:3d} on {cell.tokens:5d} + "
            f"{cell.tail:4d}{' mixed' if cell.mixed else ''}: chose {row['chosen']}; us (predicted): {times}"
        )
    print(report(regret([point for _, point in points], constants)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
