"""One decode-attention layer, by our kernels and by the FlashInfer cascade: whole and by part, checked. Table last.

Usage: PYTHONPATH=python:kernels:benchmark python benchmark/kernel_decode.py [OUT.jsonl] [--engine both]

Random data; eight layers' K and V in turn, so that none is in L2 when its turn comes; every slot that no request uses
and every buffer a kernel must write is NaN. One replay is eight layers and one schedule launch; times are per layer.
CUDA-graph replays; both engines of a case in one run, one after the other. ``floor`` is the larger of bytes over
4.3 TB/s and operations over 790 TFLOP/s for the prefixes, plus the tails' bytes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
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

from granikv_kernels.grouped_decode.record import RECORD
from granikv_kernels.record import DecodeCase

LAYERS = 8
REPEATS = 40
BYTES_PER_US = 4.3e6
OPERATIONS_PER_US = 790e6
# One layer of the faster stock backend (FlashInfer or FA3), microseconds, from the project's table of measurements.
STOCK = {
    "16K x 4": 45, "16K x 16": 129, "16K x 32": 240, "16K x 64": 503, "16K x 128": 1007, "4 groups x 16": 389,
    "8 groups x 8": 358,
}  # fmt: skip
TARGET = {"16K x 4": 45, "16K x 64": 62, "16K x 128": 110, "4 groups x 16": 75, "8 groups x 8": 105}


def floor_us(case: DecodeCase) -> float:
    """Least time on one H200."""
    row = case.kv_heads * case.head_dim * 4
    prefix_bytes = row * sum(tokens for tokens, _ in case.items)
    operations = 4 * case.q_heads * case.head_dim * sum(tokens * len(rows) for tokens, rows in case.items)
    return max(prefix_bytes / BYTES_PER_US, operations / OPERATIONS_PER_US) + row * sum(case.tails) / BYTES_PER_US


def plan_us(batch: Batch) -> float:
    """Least host time of a plan with new membership, upload included."""
    op = make_op(batch)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        op.plan(batch.items, batch.coverage)
        times.append(time.perf_counter() - began)
    return min(times) * 1e6


def bench_triton(case: DecodeCase, batch: Batch) -> dict[str, Any]:
    op = make_op(batch)
    expected, expected_lse = reference(batch)
    out = run_layer(op, batch, 0)
    error, lse_error = rms_ratio(out, expected), (op.lse - expected_lse).abs().max().item()

    def prefix(i: int) -> None:
        op.run_prefix(batch.q[i], batch.k[i], batch.v[i], batch.scale)

    def tail(i: int) -> None:
        op.run_tail(batch.q[i], batch.k[i], batch.v[i], batch.req_to_token, batch.scale)

    parts: dict[str, Callable[[int], Any]] = {
        "layer": lambda i: run_layer(op, batch, i, reschedule=i == 0),
        "prefix": prefix,
        "tail": tail,
        "merge": lambda i: op.run_merge(batch.out[i]),
    }
    row: dict[str, Any] = {"op": RECORD.name, "engine": "triton", "case": case.name}
    row |= {"rms_error": error, "lse_error": lse_error}
    for name, call in parts.items():
        median, least, most = time_graph(lambda call=call: [call(i) for i in range(LAYERS)], LAYERS, REPEATS)  # type: ignore[misc]
        row[f"{name}_us"], row[f"{name}_range_us"] = median, [least, most]
    return row | {"floor_us": floor_us(case), "plan_us": plan_us(batch), "repeats": REPEATS, "layers": LAYERS}


def bench(case: DecodeCase, engine: str) -> dict[str, Any]:
    batch = make_batch(case, LAYERS)
    if engine == "triton":
        return bench_triton(case, batch)
    # Only this one needs the overlay, SGLang and FlashInfer.
    from kernel_cascade import bench_cascade  # noqa: PLC0415

    return bench_cascade(case, batch, LAYERS, REPEATS) | {"floor_us": floor_us(case)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="JSON lines to append to")
    parser.add_argument("--engine", choices=("triton", "cascade", "both"), default="triton", help="default: triton")
    args = parser.parse_args()
    engines = ("triton", "cascade") if args.engine == "both" else (args.engine,)
    rows = []
    for case in RECORD.bench:
        assert isinstance(case, DecodeCase)
        for engine in engines:
            rows.append(bench(case, engine))
            torch.cuda.empty_cache()
    if args.out is not None:
        write_lines(args.out, [environment() | row for row in rows])
    print(
        "one layer, 32 query / 8 KV heads x 128, bf16, 256-token tails; microseconds, median (range) of graph replays"
    )
    print(
        f"{'case':14s} {'engine':8s} {'layer':>7s} {'range':>15s} {'target':>7s} {'stock*':>7s} {'floor':>6s} "
        f"{'prefix':>7s} {'tail':>6s} {'merge':>6s} {'plan':>6s} {'error':>8s} {'lse err':>8s}"
    )
    for r in rows:
        low, high = r["layer_range_us"]
        print(
            f"{r['case']:14s} {r['engine']:8s} {r['layer_us']:7.1f} {f'{low:.1f} - {high:.1f}':>15s} "
            f"{TARGET.get(r['case'], ''):>7} {STOCK[r['case']]:7d} {r['floor_us']:6.1f} {r['prefix_us']:7.1f} "
            f"{r['tail_us']:6.1f} {r['merge_us']:6.1f} {r['plan_us']:6.0f} {r['rms_error']:8.1e} {r['lse_error']:8.1e}"
        )
    print("* measured in another run on this kind of GPU")


if __name__ == "__main__":
    main()
