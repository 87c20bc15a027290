"""``python -m granikv_sglang.calibrate``: measure this device for the regime classifier, in at most three minutes."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from granikv_sglang.calibrate.cells import Cell, Layout, calibration_grid, cpu_grid
from granikv_sglang.core import GraniKVError, cache_root, commit
from granikv_sglang.plan import Kind
from granikv_sglang.plan.table import Device, user_path

SECONDS = 150.0
"""Time for measuring; start-up, compilation and the fit take what is left of three minutes."""
WARM_SECONDS = 100.0


def parser() -> argparse.ArgumentParser:
    """Flags of the command."""
    made = argparse.ArgumentParser(prog="python -m granikv_sglang.calibrate", description=__doc__)
    made.add_argument("--out", type=Path, metavar="FILE", help="where to write; default: the user's cache")
    made.add_argument("--raw", type=Path, metavar="FILE", help="JSON lines of raw timings: continued if they are there")
    made.add_argument("--fit-only", action="store_true", help="measure nothing: fit what --raw holds, on any machine")
    made.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help=f"for measuring (default {SECONDS})")
    made.add_argument("--device", choices=("auto", "cpu"), default="auto", help="auto: a GPU where there is one")
    made.add_argument(
        "--tp",
        type=int,
        metavar="N",
        help="measure the all-reduce between N ranks instead, and put it into the calibration that is there",
    )
    made.add_argument("--warm", metavar="HEADS", help=argparse.SUPPRESS)
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    made.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; a refusal is one line on stderr."""
    options = parser().parse_args(argv)
    try:
        return _warm(options.warm) if options.warm else _run(options)
    except GraniKVError as error:
        print(f"granikv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("granikv: interrupted; nothing was written except raw timings (--raw)", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    if not options.seconds > 0:
        raise GraniKVError(f"--seconds must be above 0, got {options.seconds}")
    if options.fit_only:
        return _fit_only(options)
    # torch and SGLang take seconds to import: only after the flags are known to be good.
    import torch  # noqa: PLC0415

    from granikv_sglang.calibrate.meter import Lines, Meter  # noqa: PLC0415
    from granikv_sglang.calibrate.run import calibrate, driver, measure, provenance, summary, write  # noqa: PLC0415
    from granikv_sglang.plugin.engines import device_of  # noqa: PLC0415

    began = time.monotonic()
    cuda = options.device == "auto" and torch.cuda.is_available()
    if options.tp is not None:
        return _link(options, cuda)
    device = device_of(cuda)
    print(f"calibrating on {device.name}; leave the machine alone for at most three minutes", flush=True)
    meter: Meter
    if cuda:
        cells = calibration_grid()
        warm_up([cell.layout for cell in cells])
        from granikv_sglang.calibrate.cuda import CudaMeter  # noqa: PLC0415

        meter = CudaMeter()
    else:
        from granikv_sglang.calibrate.cpu import CpuMeter  # noqa: PLC0415

        cells, meter = cpu_grid(), CpuMeter()
    lines = Lines(options.raw, about_of(device))
    left = max(10.0, min(options.seconds, 170.0 - (time.monotonic() - began)))
    if not measure(cells, meter, lines, left):
        print(f"time is up: {len({t.cell for t in lines.timings})} of {len(cells)} cells were timed", flush=True)
    result = calibrate(lines, device)
    path = options.out or user_path(cache_root(), device.name)
    write(path, device, result, provenance(device, result, time.monotonic() - began, driver()))
    print("\n".join(summary(result)))
    print(f"written to {path}; servers started from now on use it")
    return 0


def _link(options: argparse.Namespace, cuda: bool) -> int:
    from granikv_sglang.calibrate.link import calibrate_link, run_rank  # noqa: PLC0415
    from granikv_sglang.plugin.engines import device_of  # noqa: PLC0415

    if options.rank is not None:
        run_rank(options.rank, options.tp, options.port, cuda)
    else:
        print("\n".join(calibrate_link(options.tp, device_of(cuda), options.out)))
    return 0


def _fit_only(options: argparse.Namespace) -> int:
    from granikv_sglang.calibrate.meter import Lines  # noqa: PLC0415
    from granikv_sglang.calibrate.offline import device_in  # noqa: PLC0415
    from granikv_sglang.calibrate.run import calibrate, provenance, summary, write  # noqa: PLC0415

    if options.raw is None or options.out is None:
        raise GraniKVError("--fit-only needs --raw FILE to read and --out FILE to write")
    device, driver = device_in(options.raw)
    result = calibrate(Lines(options.raw, about_of(device)), device)
    write(options.out, device, result, provenance(device, result, 0.0, driver))
    print("\n".join(summary(result)))
    print(f"written to {options.out}")
    return 0


def about_of(device: Device) -> dict[str, object]:
    """What stands on every raw line, so that it can be fitted elsewhere."""
    from granikv_sglang.calibrate.run import driver  # noqa: PLC0415

    machine = device.machine
    return {
        "device": device.name,
        "machine": {"kind": machine.kind.value, "units": machine.units},
        "versions": dict(device.versions),
        "driver": driver() if machine.kind is Kind.CUDA else "",
        "commit": commit(),
    }


def warm_up(layouts: Sequence[Layout], seconds: float = WARM_SECONDS) -> None:
    """Compile every layout's kernels, one process a layout side by side: the compilers' caches on disk hold the rest.

    A process that takes too long is ended: what it has not compiled is compiled while measuring.
    """
    began = time.monotonic()
    names = list(dict.fromkeys(f"{x.q_heads}/{x.kv_heads}/{x.head_dim}" for x in layouts))
    started = [
        subprocess.Popen([sys.executable, "-m", "granikv_sglang.calibrate", "--warm", name], stdout=subprocess.DEVNULL)
        for name in names
    ]
    for process in started:
        try:
            process.wait(max(1.0, seconds - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    print(f"kernels of {len(names)} head layouts ready after {time.monotonic() - began:.0f} s", flush=True)


def _warm(heads: str) -> int:
    from granikv_sglang.calibrate.cuda import CudaMeter  # noqa: PLC0415
    from granikv_sglang.core import Regime  # noqa: PLC0415

    layout = Layout(*(int(part) for part in heads.split("/")))
    # Row counts that are and are not multiples of 16: Triton compiles for each kind.
    cells = [Cell(layout, 1, members, 700, 64) for members in (3, 16, 100)]
    meter = CudaMeter()
    meter.open(layout, cells)
    for cell in cells:
        for regime in Regime:
            meter.time(cell, regime)
    return 0


if __name__ == "__main__":
    sys.exit(main())
