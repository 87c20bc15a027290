"""The doctor: everything a bug report needs, on one screen or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from granikv_sglang import __version__
from granikv_sglang.config import NAME, GraniKVConfig
from granikv_sglang.core import GraniKVError

PACKAGES = ("sglang", "torch", "triton", "flashinfer-python", "transformers", "sglang-kernel")


def examine() -> dict[str, Any]:
    """Versions, device, hooks and options of this installation, as JSON-ready values. ``ok`` sums it up."""
    report: dict[str, Any] = {
        "granikv": __version__,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "device": _device(),
        "problems": [],
    }
    try:
        report["options"] = dataclasses.asdict(GraniKVConfig.from_env())
        report.update(_plugin())
    except GraniKVError as error:
        report["problems"].append(str(error))
    report["problems"] += [f"{h['target']}: {h['problem']}" for h in report.get("hooks", []) if h["problem"]]
    report["ok"] = not report["problems"]
    return report


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device() -> dict[str, Any]:
    import torch  # noqa: PLC0415  (a second: only when there is something to report)

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return {
            "kind": "cuda",
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
        }
    return {"kind": "cpu", "name": platform.processor() or platform.machine(), "cores": os.cpu_count()}


def _plugin() -> dict[str, Any]:
    """Load the plug-in as a server would and look at what landed."""
    from sglang.srt.mem_cache.registry import get_radix_cache_factory  # noqa: PLC0415  (tens of seconds)
    from sglang.srt.platforms import current_platform  # noqa: PLC0415
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415

    from granikv_sglang.plugin.checks import SGLANG_VERSION  # noqa: PLC0415

    load_plugins()
    factory = get_radix_cache_factory(NAME)
    if factory is None:
        raise GraniKVError("the plug-in did not load; run with SGLANG_LOG_LEVEL=debug for SGLang's reason")
    runtime = factory.__self__
    found = _version("sglang")
    if found != SGLANG_VERSION:
        raise GraniKVError(
            f"sglang {found} is installed, this GraniKV is built for {SGLANG_VERSION}; install that version"
        )
    return {
        "platform": type(current_platform).__name__,
        "stock_backend": runtime.stock_backend,
        "hooks": [
            {"target": s.hook.target, "kind": s.hook.kind.value, "landed": s.landed, "problem": s.problem}
            for recorder in runtime.recorders
            for s in recorder.statuses()
        ],
    }


def render(report: dict[str, Any]) -> str:
    """The report as text, one fact a line, problems last."""
    lines = [f"granikv {report['granikv']}   python {report['python']}"]
    lines += [f"  {name:<18} {found}" for name, found in report["versions"].items()]
    lines.append("device   " + ", ".join(f"{k} {v}" for k, v in report["device"].items()))
    if "platform" in report:
        lines.append(f"platform {report['platform']}, stock attention backend {report['stock_backend']}")
    for hook in report.get("hooks", []):
        mark = "landed " if hook["landed"] else "MISSING"
        lines.append(f"hook     {mark} {hook['kind']:<7} {hook['target'].removeprefix('sglang.srt.')}")
    for name, value in report.get("options", {}).items():
        lines.append(f"option   {name} = {value}")
    lines += [f"PROBLEM  {problem}" for problem in report["problems"]]
    lines.append("all is well" if report["ok"] else "GraniKV refuses to serve until the problems above are mended")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print the report; exit code 0 when everything is in place, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m granikv_sglang.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(list(argv))
    report = examine()
    print(json.dumps(report, indent=2) if args.json else render(report), file=sys.stdout)
    return 0 if report["ok"] else 1
