"""Calibrations on disk: one JSON file a device, checked when read, and the order in which a server looks for one."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from granikv_sglang.core import GraniKVError, Regime
from granikv_sglang.plan.cost import (
    FRACTIONS,
    Constants,
    Link,
    SharedConstants,
    UniformConstants,
    analytic,
)
from granikv_sglang.plan.work import Kind, Machine

FORMAT = 3
"""Grows when the model's terms change, so that old constants would mean something else."""
SHIPPED = Path(__file__).parent / "tables"
COMMAND = "python -m granikv_sglang.calibrate"


@dataclass(frozen=True)
class Device:
    """What a calibration belongs to: the device's name, its kind and units, and the versions of what was timed."""

    name: str
    machine: Machine
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Calibration:
    """Constants with where they come from.

    Attributes:
        constants: for the classifier.
        source: ``calibrated``, ``shipped`` or ``analytic``.
        line: one line for people: what is used, and what to do about it.
        refused: one line for each file that was there and was not used.
        provenance: what the file says about its making; empty for analytic constants.
    """

    constants: Constants
    source: str
    line: str
    refused: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def table_name(device_name: str) -> str:
    """File name of a device's calibration: ``NVIDIA H200`` -> ``nvidia-h200.json``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json"


def user_path(cache: Path, device_name: str) -> Path:
    """Where the user's own calibration of a device lies."""
    return cache / "calibration" / table_name(device_name)


def save(path: Path, device: Device, constants: Constants, provenance: Mapping[str, Any]) -> None:
    """Write a calibration beside its place and rename it there: a server never reads half a file."""
    value = {
        "format": FORMAT,
        "device": device.name,
        "versions": dict(device.versions),
        "constants": constants_to_json(constants),
        "provenance": dict(provenance),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".json.part")
    beside.write_text(json.dumps(value, indent=1) + "\n")
    beside.replace(path)


def load(path: Path, device: Device) -> tuple[Constants, Mapping[str, Any]]:
    """Constants and provenance of a file. Raises GraniKVError, one line, where it cannot be used on this device."""

    def refuse(why: str) -> GraniKVError:
        return GraniKVError(f"calibration {path} is not used: {why}; run {COMMAND} again")

    try:
        value = json.loads(path.read_text())
        if not isinstance(value, dict):
            raise ValueError("it is no JSON object")
        if value.get("format") != FORMAT:
            raise refuse(f"its format is {value.get('format')!r}, this GraniKV reads {FORMAT}")
        if value["device"] != device.name:
            raise refuse(f"it was made on {value['device']!r}, this is {device.name!r}")
        for name, version in device.versions.items():
            if value["versions"].get(name) != version:
                raise refuse(f"it was made with {name} {value['versions'].get(name)}, this is {version}")
        constants = constants_from_json(value["constants"])
        if constants.machine != device.machine:
            raise refuse(f"it was made on {constants.machine.units} units, this device has {device.machine.units}")
        return constants, dict(value["provenance"])
    except OSError as error:
        raise refuse(f"it cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise refuse(f"it is damaged ({type(error).__name__}: {str(error).splitlines()[0]})") from error


def find(device: Device, cache: Path, shipped: Path = SHIPPED) -> Calibration:
    """The first that can be used: the user's own, the one shipped for this device, analytic constants."""
    refused = []
    for source, path in (
        ("calibrated", user_path(cache, device.name)),
        ("shipped", shipped / table_name(device.name)),
    ):
        if not path.exists():
            continue
        try:
            constants, provenance = load(path, device)
        except GraniKVError as error:
            refused.append(str(error))
            continue
        made = provenance.get("date", "an unknown day")
        what = f"calibrated on this machine, {path}" if source == "calibrated" else "shipped table"
        return Calibration(constants, source, f"{what} ({device.name}, {made})", tuple(refused), provenance)
    line = f"analytic defaults, nothing was measured on {device.name}; {COMMAND} measures it in three minutes"
    return Calibration(analytic(device.machine), "analytic", line, tuple(refused))


def constants_to_json(constants: Constants) -> dict[str, Any]:
    """JSON-ready; six digits are far more than any measurement has."""
    value = dataclasses.asdict(constants)
    value["regimes"] = [regime.value for regime in constants.regimes]
    value["machine"]["kind"] = constants.machine.kind.value
    for part in ("uniform", "plain", "cascade", "gemm", "link"):
        value[part] = {name: float(f"{x:.6g}") for name, x in value[part].items()}
    return value


def constants_from_json(value: Mapping[str, Any]) -> Constants:
    """The reverse. Raises ValueError, KeyError or TypeError where a value is missing or out of its range."""
    machine = Machine(Kind(value["machine"]["kind"]), int(value["machine"]["units"]))
    margin = _number("margin", value["margin"], fraction=True)
    plain_margin = _number("plain_margin", value["plain_margin"], fraction=True)
    regimes = tuple(Regime(name) for name in value["regimes"])
    if not regimes or Regime.UNIFORM in regimes or len(set(regimes)) != len(regimes):
        raise ValueError(f"regimes {value['regimes']!r} are no shared regimes")
    return Constants(
        machine=machine,
        uniform=_part(UniformConstants, value["uniform"]),
        plain=_part(UniformConstants, value["plain"]),
        cascade=_part(SharedConstants, value["cascade"]),
        gemm=_part(SharedConstants, value["gemm"]),
        link=_part(Link, value["link"]),
        margin=margin,
        plain_margin=plain_margin,
        regimes=regimes,
    )


def _part(cls: type[Any], value: Mapping[str, Any]) -> Any:
    names = [f.name for f in dataclasses.fields(cls)]
    if set(value) != set(names):
        raise ValueError(f"{cls.__name__} has {sorted(value)}, not {sorted(names)}")
    return cls(**{name: _number(name, value[name], name in FRACTIONS) for name in names})


def _number(name: str, value: Any, fraction: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, not a number")
    if not (0 <= value <= 1 if fraction else value > 0):
        raise ValueError(f"{name} is {value!r}, out of its range")
    return float(value)
