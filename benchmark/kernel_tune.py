"""Try many tuning points of grouped decode on one GPU: parts apart, then whole layers. Tables and JSON lines.

Usage: PYTHONPATH=kernels:benchmark python benchmark/kernel_tune.py OUT.jsonl [round]
Compiles all points in parallel worker processes first (into Triton's disk cache), then measures one after the other.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from kernel_harness import (
    Batch,
    environment,
    make_batch,
    make_op,
    reference,
    rms_ratio,
    run_layer,
    time_graph,
    write_lines,
)
from kernel_rounds import EXTRA, ROUNDS

from granikv_kernels.grouped_decode import KernelConfig
from granikv_kernels.grouped_decode.record import RECORD
from granikv_kernels.record import DecodeCase

LAYERS = 4
PASSES = 2


def compiled_part(config: KernelConfig) -> KernelConfig:
    """The point with everything that only the host's planning reads as shipped: equal ones compile the same kernels."""
    shipped = KernelConfig()
    planned = ("narrow_rows", "narrow_least", "unit_overhead", "part_overhead", "equal_shares_items", "tails_last")
    tail = dataclasses.replace(config.tail, units_per_sm=shipped.tail.units_per_sm)
    return dataclasses.replace(config, tail=tail, **{name: getattr(shipped, name) for name in planned})


def compile_point(config: KernelConfig) -> str:
    """In a worker: run one small batch, which compiles what the point needs."""
    try:
        batch = make_batch(DecodeCase("small", 32, 8, 128, ((200, (0, 1)),), (70, 3)), 1)
        run_layer(make_op(batch, config), batch, 0)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{short(config)}: {error!r}"[:400]
    return ""


def measure(kind: str, batch: Batch, config: KernelConfig) -> tuple[float, float, float]:
    """Microseconds a layer of one part, or of the whole layer."""
    op = make_op(batch, config)
    run_layer(op, batch, 0)

    def record() -> None:
        for _ in range(PASSES):
            if kind != "prefix":
                op.schedule(batch.seq_lens, batch.req_index)
            for i in range(LAYERS):
                if kind == "prefix":
                    op.run_prefix(batch.q[i], batch.k[i], batch.v[i], batch.scale)
                elif kind == "tail":
                    op.run_tail(batch.q[i], batch.k[i], batch.v[i], batch.req_to_token, batch.scale)
                elif kind == "merge":
                    op.run_merge(batch.out[i])
                else:
                    run_layer(op, batch, i, reschedule=False)

    return time_graph(record, LAYERS * PASSES, repeats=15)


def error_of(batch: Batch, config: KernelConfig, expected: torch.Tensor) -> float:
    op = make_op(batch, config)
    batch.out[0].fill_(float("nan"))
    return rms_ratio(run_layer(op, batch, 0), expected)


def main() -> None:
    path, chosen = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "4"
    plan = ROUNDS[chosen]
    began = time.time()
    tasks = list(dict.fromkeys(compiled_part(config) for _, _, points in plan for config in points))
    workers = min(len(tasks), max(1, (os.cpu_count() or 4) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for text in pool.map(compile_point, tasks):
            if text:
                print("COMPILE", text, flush=True)
    print(f"compiled {len(tasks)} points in {time.time() - began:.0f} s", flush=True)
    cases = {case.name: case for case in (*RECORD.bench, *EXTRA)}
    names = list(dict.fromkeys(name for _, shapes, _ in plan for name in shapes))
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for name in names:
        batch = make_batch(cases[name], LAYERS)  # type: ignore[arg-type]
        expected, _ = reference(batch)
        for p, (kind, shapes, points) in enumerate(plan):
            if name not in shapes:
                continue
            for c, config in enumerate(points):
                row = rows.setdefault((p, c), {"kind": kind, "config": short(config), "us": {}, "error": {}})
                try:
                    if kind in ("prefix", "tail", "layer"):
                        row["error"][name] = error_of(batch, config, expected)
                    row["us"][name] = measure(kind, batch, config)
                except Exception as error:
                    row["us"][name] = (float("nan"),) * 3
                    print(kind, short(config), name, repr(error)[:300], flush=True)
                    if "CUDA error" in repr(error):
                        traceback.print_exc()
                        raise SystemExit(1) from error
        del batch, expected
        torch.cuda.empty_cache()
        print(f"{name} done at {time.time() - began:.0f} s", flush=True)
    write_lines(path, [environment() | row for row in rows.values()])
    for p, (kind, shapes, points) in enumerate(plan):
        print(f"\n{kind:8s}" + " ".join(f"{s[:10]:>10s}" for s in shapes) + "  worst error, config")
        for c in range(len(points)):
            row = rows[(p, c)]
            worst = max(row["error"].values(), default=0.0)
            print(" " * 8 + " ".join(f"{row['us'][s][0]:10.1f}" for s in shapes) + f"  {worst:.1e} " + row["config"])


def short(config: KernelConfig) -> str:
    """What differs from the shipped point."""
    shipped = KernelConfig()
    changed = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return " ".join(f"{k}={v}" for k, v in changed.items() if v != getattr(shipped, k)) or "shipped"


if __name__ == "__main__":
    main()
