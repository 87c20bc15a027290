"""Promotion copy: milliseconds and bandwidth at full size, checked against the reference. Prints a table last.

Usage: PYTHONPATH=kernels:benchmark python benchmark/kernel_copy.py [OUT.jsonl]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from kernel_harness import environment, time_graph, write_lines

from granikv_kernels.copy_slots.launch import SlotCopier
from granikv_kernels.copy_slots.record import RECORD
from granikv_kernels.record import CopyCase


def bench(case: CopyCase) -> dict[str, Any]:
    """Time one case in a graph of one copy; every buffer is compared afterwards."""
    gen = torch.Generator(device="cuda").manual_seed(1)
    shape = (case.slots, case.kv_heads, case.head_dim)
    dtype = getattr(torch, case.dtype)
    buffers = [torch.randn(shape, generator=gen, device="cuda").to(dtype) for _ in range(2 * case.layers)]
    order = torch.randperm(case.slots, generator=gen, device="cuda")
    destination = torch.arange(case.slots - case.tokens, case.slots, device="cuda")
    source = order[order < case.slots - case.tokens][: case.tokens]
    if not case.contiguous:
        source, destination = order[: case.tokens], order[-case.tokens :]
    expected = [b[source].clone() for b in buffers]
    for b in buffers:
        b[destination] = float("nan")
    copier = SlotCopier(buffers)
    median, least, most = time_graph(lambda: copier.copy(source, destination), 1, repeats=15)
    right = all(torch.equal(b[destination], e) for b, e in zip(buffers, expected, strict=True))
    moved = 2 * 2 * case.layers * case.tokens * copier.row_bytes
    return {
        "op": RECORD.name, "case": case.name, "right": right, "ms": median / 1e3, "ms_range": [least / 1e3, most / 1e3],
        "bytes": moved, "TB_s": moved / median / 1e6, "repeats": 15,
    }  # fmt: skip


def main() -> None:
    rows = [bench(case) for case in RECORD.bench if isinstance(case, CopyCase)]
    if len(sys.argv) > 1:
        write_lines(Path(sys.argv[1]), [environment() | row for row in rows])
    print(f"{'case':20s} {'right':>6s} {'ms':>8s} {'least':>8s} {'most':>8s} {'TB/s':>6s}")
    for r in rows:
        low, high = r["ms_range"]
        print(f"{r['case']:20s} {r['right']!s:>6s} {r['ms']:8.3f} {low:8.3f} {high:8.3f} {r['TB_s']:6.2f}")


if __name__ == "__main__":
    main()
