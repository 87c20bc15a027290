"""What the numbers were measured on: versions, commit, device, and its clocks while each run lasts."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from granikv_sglang.core import commit

PACKAGES = ("granikv-sglang", "sglang", "torch", "triton", "flashinfer-python", "transformers")
_QUERY = "clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu"
_NAMES = ("sm_mhz", "memory_mhz", "celsius", "watts", "busy_percent")
_BUSY = 5
"""Per cent of utilisation from which a sample of the GPU counts: an idle GPU lowers its clocks."""


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is here, asked without creating a CUDA context."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False, text=True).stdout.startswith("GPU")


@contextlib.contextmanager
def collector_held() -> Iterator[None]:
    """Python's garbage collector rests inside, as in timeit, and has nothing old to walk through after.

    SGLang's imports make 800,000 objects; one pass over them takes 0.4 s, in which no request is sent or read.
    """
    gc.collect()
    gc.freeze()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    """Versions, commit, device, date, and the command that measures the same again."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit(),
        "device": _device(),
        "python": platform.python_version(),
        "versions": versions,
        "replay": shlex.join(["python", "-m", "granikv_sglang.bench_serving", *argv]),
    }


def _device() -> str:
    if has_gpu():
        lines = _ask("name,driver_version").strip().splitlines()
        return f"{len(lines)} x {lines[0]}" if lines else "GPU, nvidia-smi does not say which"
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} CPU cores, {names[0] if names else platform.machine()}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


@dataclass
class Clocks:
    """Samples the device's clocks while the ``with`` block runs; ``summary`` afterwards, empty when unreadable.

    On a GPU: medians of the samples taken while it was busy, from one nvidia-smi that runs alongside (twice a second;
    it costs no Python time). On a CPU: mean core clock and load average, at the end.
    """

    gpu: bool
    summary: dict[str, float] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clocks:
        if self.gpu:
            command = [*_query(_QUERY), "-lms", "500"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return self

    def __exit__(self, *_details: object) -> None:
        if self._process is None:
            self.summary = cpu_clocks()
            return
        self._process.terminate()
        self.summary = gpu_clocks(self._process.communicate()[0])
        if not self.summary:
            # Some hosts give nothing while it runs: the clock just after the run is still up.
            self.summary = gpu_clocks(_ask(_QUERY))


def gpu_clocks(text: str) -> dict[str, float]:
    """Medians over the busy samples of nvidia-smi's output (all GPUs together); over all when none was busy.

    What a GPU does not report is left out.
    """
    rows = [[_number(part) for part in line.split(",")] for line in text.splitlines()]
    # A line may be cut off at the end; without the SM clock a sample says nothing.
    rows = [row for row in rows if len(row) == len(_NAMES) and row[0] is not None]
    rows = [row for row in rows if (row[-1] or 0) >= _BUSY] or rows
    summary: dict[str, float] = {}
    for name, column in zip(_NAMES, zip(*rows, strict=True), strict=False):
        values = [value for value in column if value is not None]
        if values:
            summary[name] = statistics.median(values)
    return summary | ({"samples": len(rows)} if rows else {})


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _query(query: str) -> list[str]:
    """nvidia-smi's command line. Of a host's GPUs only those count that servers started from here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = ["-i", visible] if visible else []
    return ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", *chosen]


def _ask(query: str) -> str:
    return subprocess.run(_query(query), capture_output=True, check=False, text=True).stdout


def cpu_clocks() -> dict[str, float]:
    """Mean clock of the cores in MHz where the kernel tells it, and the load average of the last minute."""
    clocks = [float(line.split(":")[1]) for line in _cpuinfo() if line.startswith("cpu MHz")]
    mean = {"cpu_mhz": round(statistics.mean(clocks), 1)} if clocks else {}
    return {**mean, "load_1m": round(os.getloadavg()[0], 2)}
