"""Where the time of a run went: attention, communication, matrix products, the rest and idle, from SGLang's own traces.

    python benchmark/engine_decode.py --model DIR --points hetero --profile TRACES ...
    python benchmark/trace_shares.py TRACES/*.trace.json.gz [--out shares.jsonl]

A trace is the Chrome trace that SGLang's profiler writes, one a rank. What was launched by a CUDA graph is decode, the
rest of the device's work is prefill (prefill graphs are off in these benchmarks), and the phases are the stretches of
time between. Parts are sums of kernel durations; idle is wall time in which nothing at all ran. The profiler slows the
host down, so idle time is an upper bound; kernel durations are as without it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = (
    ("communication", re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device|multimem", re.I)),
    (
        "attention",
        # Ours; FlashInfer's and FlashAttention's; the merges of both; the schedule of private tails.
        re.compile(
            r"^(prefix|tail|merge|merge_listed|schedule|extent_slots|tail_slots|gather_rows)_kernel"
            r"|PagedKVCache|RaggedKVCache|WithKVCache|MergeState|MergeStates|PersistentVariable|fmha|flash_fwd|mha_",
        ),
    ),
    ("matrix products", re.compile(r"gemm|gemv|cutlass|nvjet|xmma|splitK|cublas", re.I)),
)
"""Name of a part and what its kernels are called; the first that matches. All else is ``rest``."""
NAMES = (*(name for name, _ in PARTS), "rest")
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass
class Phase:
    """A stretch of the run; microseconds."""

    wall: float = 0.0
    busy: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    launches: int = 0
    """CUDA graphs launched: decode steps."""
    top: list[tuple[str, float]] = field(default_factory=list)
    """The kernels that take longest, by name, with the sum of their durations."""


def events_of(path: Path) -> list[dict[str, Any]]:
    """Complete events of a Chrome trace, gzipped or not."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [event for event in json.loads(data)["traceEvents"] if event.get("ph") == "X"]


def part_of(kernel: str) -> str:
    """The part that a kernel's name belongs to."""
    return next((name for name, pattern in PARTS if pattern.search(kernel)), "rest")


def union_us(events: Iterable[dict[str, Any]]) -> float:
    """Microseconds in which at least one of the events lasts; sorted by start."""
    total, until = 0.0, float("-inf")
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def phase_of(events: Sequence[dict[str, Any]], begin: float, end: float, launches: int) -> Phase:
    """The phase from ``begin`` to ``end`` with the device's work in it."""
    phase = Phase(end - begin, union_us(events), launches=launches)
    kernels: Counter[str] = Counter()
    for event in events:
        phase.parts[part_of(event["name"])] += event["dur"]
        kernels[event["name"]] += event["dur"]
    phase.top = kernels.most_common(8)
    return phase


def phases_of(events: Sequence[dict[str, Any]]) -> dict[str, Phase]:
    """``start`` (host alone), ``prefill``, ``decode`` and ``end`` (host alone) of one run.

    Raises ValueError for a trace without work of a device or without CUDA graphs.
    """
    work = sorted((e for e in events if e.get("cat") in DEVICE), key=lambda e: e["ts"])
    graphs = {
        e["args"]["correlation"]
        for e in events
        if e["name"] == "cudaGraphLaunch" and "correlation" in e.get("args", {})
    }
    first = next((e["ts"] for e in work if e["args"].get("correlation") in graphs), None)
    if first is None:
        raise ValueError("no CUDA graph was launched in it: profile decode steps, on a GPU")
    last = max(e["ts"] + e["dur"] for e in work)
    lowest, highest = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
    before, after = [e for e in work if e["ts"] < first], [e for e in work if e["ts"] >= first]
    began = before[0]["ts"] if before else first
    replayed = {e["args"].get("correlation") for e in after} & graphs
    return {
        "start": Phase(began - lowest),
        "prefill": phase_of(before, began, first, 0),
        "decode": phase_of(after, first, last, len(replayed)),
        "end": Phase(highest - last),
    }


def row_of(name: str, phases: dict[str, Phase]) -> dict[str, Any]:
    """One line of results: milliseconds by phase, and of a decode step."""
    row: dict[str, Any] = {"trace": name}
    for what, phase in phases.items():
        row[what] = {"wall_ms": round(phase.wall / 1e3, 3), "idle_ms": round((phase.wall - phase.busy) / 1e3, 3)}
        row[what] |= {part: round(us / 1e3, 3) for part, us in phase.parts.items() if us}
    decode = phases["decode"]
    steps = max(1, decode.launches)
    row["steps"] = decode.launches
    row["step_share"] = {part: round(us / decode.wall, 4) for part, us in decode.parts.items()}
    row["step_share"]["idle"] = round(1 - decode.busy / decode.wall, 4)
    row["step_ms"] = round(decode.wall / steps / 1e3, 4)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a decode step by part, and the other phases."""
    lines = [
        "| trace | step ms | " + " | ".join(NAMES) + " | idle | start ms | prefill ms (idle) | end ms |",
        "|---|---|" + "---|" * (len(NAMES) + 4),
    ]
    for row in rows:
        shares = " | ".join(f"{row['step_share'][part]:.1%}" for part in (*NAMES, "idle"))
        prefill = f"{row['prefill']['wall_ms']:.1f} ({row['prefill']['idle_ms']:.1f})"
        ends = f"{row['start']['wall_ms']:.1f} | {prefill} | {row['end']['wall_ms']:.1f}"
        lines.append(f"| {row['trace']} | {row['step_ms']:.2f} | {shares} | {ends} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--kernels", action="store_true", help="also the kernels that take longest, by phase")
    parser.add_argument("--out", type=Path, help="append a JSON line for each trace")
    args = parser.parse_args()
    rows = []
    for path in args.traces:
        try:
            phases = phases_of(events_of(path))
        except (OSError, ValueError, KeyError) as error:
            print(f"granikv: {path}: {error}", file=sys.stderr)
            return 1
        rows.append(row_of(path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".trace"), phases))
        for what, phase in phases.items() if args.kernels else ():
            for name, us in phase.top:
                print(f"{rows[-1]['trace']} {what} {us / 1e3:10.3f} ms  {name[:110]}")
    if args.out is not None:
        with args.out.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
