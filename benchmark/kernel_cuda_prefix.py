"""Time the CUDA prefix pass, with its merge, and the whole layer (prefix, private tails and merge) in one launch.

    python benchmark/kernel_cuda_prefix.py [--trials] [--cases 16Kx64 ...] [--out FILE.jsonl]

CUDA-graph replays, median, random data, inputs rotated beyond L2. Llama-3.1-8B heads (32 query, 8 KV, 128) unless
--heads says otherwise. One JSON line a (case, variant), a table last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "kernels"))

from granikv_kernels.grouped_prefix_cuda import (  # noqa: E402
    DEFAULT,
    FUSED,
    TRIALS,
    GroupedPrefixCuda,
    Tails,
    Variant,
)
from granikv_sglang.core import commit  # noqa: E402

K = 1024
# name -> (length, members) per item
CASES: dict[str, list[tuple[int, int]]] = {
    "128x64": [(128, 64)],  # next to no work: launch, first loads, last stores
    "16Kx4": [(16 * K, 4)],
    "16Kx16": [(16 * K, 16)],
    "16Kx32": [(16 * K, 32)],
    "16Kx64": [(16 * K, 64)],
    "16Kx128": [(16 * K, 128)],
    "64Kx64": [(64 * K, 64)],
    "4groups": [(16 * K, 16), (12 * K, 16), (8 * K, 16), (4 * K, 16)],
    "8groups": [(2 * K * (i + 1), 8) for i in range(8)],
}


def replay_us(step, sets: int, replays: int) -> tuple[float, float, float]:
    """Microseconds of one step: (median, least, most) over graph replays of one step per input set, twice around."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(sets):
            step(i)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(2 * sets):
                step(i % sets)
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (2 * sets))
    return statistics.median(times), min(times), max(times)


def floors(case: list[tuple[int, int]], heads: tuple[int, int, int], tflops: float, tbs: float) -> tuple[float, float]:
    q_heads, kv_heads, dim = heads
    flops = sum(4 * n * m * q_heads * dim for n, m in case)
    return flops / tflops / 1e6, sum(4 * n * kv_heads * dim for n, _ in case) / tbs / 1e6


def ceilings() -> tuple[float, float]:
    """Measured TFLOP/s (bf16 matrix product) and TB/s (copy), for the record."""
    a = torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16)
    product, _, _ = replay_us(lambda _: a @ a, 1, 5)
    big = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(big)
    copy, _, _ = replay_us(lambda _: torch.neg(big, out=other), 1, 5)  # a kernel: copy_ becomes a memcpy node
    return 2 * 8192**3 / product / 1e6, 2 * big.nbytes / copy / 1e6


def measure(case: str, variant: Variant, heads: tuple[int, int, int], args: argparse.Namespace) -> dict[str, object]:
    q_heads, kv_heads, dim = heads
    items = CASES[case]
    rows = sum(m for _, m in items)
    shared = sum(n for n, _ in items) + 64 * len(items)
    slots = shared + rows * args.tail
    starts, at = [], 7
    for n, _ in items:
        starts.append(at)
        at += n + 5
    sets = max(2, min(6, int(300e6 / (slots * kv_heads * dim * 4)) + 1))
    qs = [torch.randn((rows, q_heads, dim), device="cuda").to(torch.bfloat16) for _ in range(sets)]
    ks, vs = (
        [torch.randn((slots, kv_heads, dim), device="cuda").to(torch.bfloat16) for _ in range(sets)] for _ in "kv"
    )
    out = torch.empty_like(qs[0])
    members, first = [], 0
    for _, m in items:
        members.append(list(range(first, first + m)))
        first += m
    partial = torch.bfloat16 if args.partial == "bf16" else torch.float32
    op = GroupedPrefixCuda(
        q_heads, kv_heads, dim, torch.bfloat16, rows, variant=variant, partial_dtype=partial, trials=args.trials
    )
    coverage = [n for n, m in items for _ in range(m)]
    work = op.plan(starts, [n for n, _ in items], members, rows, coverage)
    # Tails lie scattered, token by token, as a busy server's free list leaves them.
    table = torch.zeros((rows, max(coverage) + args.tail), dtype=torch.int32, device="cuda")
    scattered = (shared + torch.randperm(rows * args.tail, device="cuda")).to(torch.int32).view(rows, args.tail)
    for r, n in enumerate(coverage):
        table[r, n : n + args.tail] = scattered[r]
    lens = torch.tensor(coverage, device="cuda") + args.tail
    tails = Tails(table, torch.arange(rows, device="cuda"), lens)
    scale = dim**-0.5

    def prefix(i: int) -> None:
        op.run(qs[i], ks[i], vs[i], scale)

    def both(i: int) -> None:
        op.run(qs[i], ks[i], vs[i], scale)
        op.merge(out)

    def layer(i: int) -> None:
        op.run(qs[i], ks[i], vs[i], scale, tails, out)

    alone, with_merge = replay_us(prefix, sets, args.replays), replay_us(both, sets, args.replays)
    whole: dict[str, object] = {}
    if variant.tail_ring:
        whole["layer_us"] = [round(x, 2) for x in replay_us(layer, sets, args.replays)]
    flops = sum(4 * n * m * q_heads * dim for n, m in items)
    return {
        "case": case,
        "variant": variant.name,
        "partial": args.partial,
        "prefix_us": [round(x, 2) for x in alone],
        "with_merge_us": [round(x, 2) for x in with_merge],
        "tail_tokens": args.tail,
        **whole,
        "tflops": round(flops / alone[0] / 1e6, 1),
        "splits": work.splits.tolist(),
        "units": int((work.units[:, :, 1] > 0).sum()),
        "makespan_blocks": work.makespan,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", action="store_true", help="every compiled tile variant, not only the default")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--heads", type=int, nargs=3, default=(32, 8, 128), metavar=("Q", "KV", "DIM"))
    parser.add_argument("--partial", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tail", type=int, default=256, help="private tokens a request")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    heads = tuple(args.heads)
    tflops, tbs = ceilings()
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "heads": list(heads),
        "measured_tflops": round(tflops),
        "measured_tb_s": round(tbs, 2),
        "replays": args.replays,
    }
    print(json.dumps(about))
    variants = [DEFAULT[heads[2]], FUSED[heads[2]], *(v for v in TRIALS if args.trials and v.head_dim == heads[2])]
    lines = []
    for case in args.cases:
        compute, bytes_us = floors(CASES[case], heads, tflops, tbs)
        for variant in variants:
            tail_us = sum(m for _, m in CASES[case]) * args.tail * heads[1] * heads[2] * 4 / tbs / 1e6
            floor = [round(x, 1) for x in (compute, bytes_us, tail_us)]
            row = {**measure(case, variant, heads, args), "floor_us": floor}
            lines.append({**about, **row})
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{'case':10}{'variant':20}  prefix  +merge  TFLOP/s   layer  floor (compute, bytes, tail)  splits")
    for x in lines:
        print(
            f"{x['case']:10}{x['variant']:20}{x['prefix_us'][0]:8.1f}{x['with_merge_us'][0]:8.1f}{x['tflops']:9.0f}"
            f"{x.get('layer_us', [0])[0]:8.1f}  {x['floor_us']}  {x['splits']}"
        )


if __name__ == "__main__":
    main()
