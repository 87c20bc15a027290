"""Raw timings looked at on another machine: whose they are."""

from __future__ import annotations

from pathlib import Path

from granikv_sglang.calibrate.meter import read_rows
from granikv_sglang.core import GraniKVError
from granikv_sglang.plan import Kind, Machine
from granikv_sglang.plan.table import Device


def device_in(path: Path) -> tuple[Device, str]:
    """The device whose timings a file holds, and its driver. Raises GraniKVError where it is not exactly one."""
    if not path.exists():
        raise GraniKVError(f"{path} is not there; name a file of raw timings with --raw")
    rows = [row for row in read_rows(path) if row.get("kind") == "timing"]
    names = sorted({str(row["device"]) for row in rows})
    if len(names) != 1:
        raise GraniKVError(f"{path} holds timings of {', '.join(names) or 'no device'}; one device is needed")
    # The newest line counts: a file may have been continued with other versions.
    row = rows[-1]
    machine = Machine(Kind(row["machine"]["kind"]), int(row["machine"]["units"]))
    return Device(names[0], machine, dict(row["versions"])), str(row["driver"])
