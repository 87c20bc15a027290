"""Whole-engine decode: GraniKV against a stock attention backend, both engines up in one process, A B A B.

Each point sends ``requests`` prompts on a warm shared prefix (or on several, or on none) with fresh private parts, once
for ``--tokens`` and once for a few output tokens; the decode step is the difference in time over the difference in
steps, so prefill, tokenisation and start cost cancel. Output tokens per second include the prefill of the private
parts. Both sides make the same number of tokens, checked. Prints a table last and writes JSON lines with provenance.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sglang as sgl
import torch

from granikv_sglang.bench_serving.machine import collector_held
from granikv_sglang.config import NAME, REGIMES, GraniKVConfig
from granikv_sglang.core import commit

RESULTS = Path(__file__).parent / "results"
FEW = 8
"""Output tokens of the short run that is subtracted."""


@dataclass(frozen=True)
class Point:
    """``groups`` holds ``(prefix tokens, members)`` of each prefix; a group of one member shares nothing."""

    name: str
    groups: tuple[tuple[int, int], ...]

    @property
    def requests(self) -> int:
        return sum(members for _, members in self.groups)


POINTS = {
    "hetero": Point("8 groups x 16, 2K to 16K", tuple((2048 * (i + 1), 16) for i in range(8))),
    "none": Point("64 x 1K, nothing shared", tuple((1024, 1) for _ in range(64))),
    "small": Point("6 on 400", ((400, 6),)),
}


def point_of(name: str) -> Point:
    """A named point, or ``REQUESTSxPREFIX`` such as ``64x16K``: that many requests on one prefix."""
    if name in POINTS:
        return POINTS[name]
    found = re.fullmatch(r"(\d+)x(\d+)(K?)", name)
    if found is None:
        raise argparse.ArgumentTypeError(f"{name!r} is neither one of {', '.join(POINTS)} nor like 64x16K")
    requests, length, kilo = int(found[1]), int(found[2]), found[3]
    return Point(f"{requests} on {length}{kilo}", ((length * (1024 if kilo else 1), requests),))


class Side:
    """One engine and its name."""

    def __init__(self, name: str, engine: Any) -> None:
        self.name = name
        self.engine = engine

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds for all prompts, and their output tokens.

        As in timeit, Python's garbage collector is held: else the lists made here, a million ids, are walked through in
        the timed part, 10 to 30 ms of it, now on one side and now on the other.
        """
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        with collector_held():
            begin = time.perf_counter()
            replies = self.engine.generate(input_ids=prompts, sampling_params=params)
            return time.perf_counter() - begin, [reply["output_ids"] for reply in replies]

    def trace(self, prompts: list[list[int]], tokens: int, folder: Path, prefix: str) -> None:
        """One run under torch's profiler, host and device; SGLang writes the Chrome trace into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        self.engine.start_profile(
            output_dir=str(folder), activities=["CPU", "GPU"], profile_prefix=f"{prefix}-{self.name}", with_stack=False
        )
        self.run(prompts, tokens)
        self.engine.stop_profile()

    def state(self) -> dict[str, Any]:
        return self.engine.get_server_info()["internal_states"][0].get(NAME, {})


def start(name: str, args: argparse.Namespace, first: bool, **extra: Any) -> Side:
    begin = time.perf_counter()
    engine = sgl.Engine(
        model_path=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_total_tokens=args.pool,
        max_running_requests=args.max_requests,
        log_level="warning",
        random_seed=1,
        tp_size=args.tp,
        gc_warning_threshold_secs=0.05,
        **(
            _gpu_options(args.max_requests, first)
            if torch.cuda.is_available()
            else {"device": "cpu", "dtype": "float32"}
        ),
        **extra,
    )
    print(f"{name} up in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return Side(name, engine)


def _gpu_options(max_requests: int, first: bool) -> dict[str, Any]:
    """Both engines share one GPU, so the second counts what the first holds; decode graphs only."""
    return {
        "mem_fraction_static": 0.5 if first else 0.85,
        "cuda_graph_max_bs_decode": max_requests,
        "disable_prefill_cuda_graph": True,
    }


def prompts_of(point: Point, seed: int, private: int) -> list[list[int]]:
    """Prompts of one run: prefixes are the same in every run, private parts never."""
    prompts = []
    own = random.Random(seed)
    for group, (length, members) in enumerate(point.groups):
        # What nothing shares is fresh in every run as well: a warm private prompt would be a shared one.
        shared = random.Random(f"{point.name}{group}{seed if members == 1 else ''}")
        prefix = [shared.randrange(100, 30000) for _ in range(length)]
        prompts += [prefix + [own.randrange(100, 30000) for _ in range(private)] for _ in range(members)]
    return prompts


def measure(point: Point, sides: list[Side], args: argparse.Namespace) -> dict[str, Any]:
    """All repetitions of one point, alternating."""
    seed = 0
    for side in sides:
        side.engine.flush_cache()
        # Warm prefix, and every kernel and shape seen once.
        side.run([prompt[:length] for prompt, length in _one_of_each(point, args.private)], 1)
        side.run(prompts_of(point, 10**6, args.private), FEW)
        # As SGLang advises for servers: the scheduler's collector has no need to walk through what start-up has made.
        side.engine.freeze_gc()
    steps: dict[str, list[float]] = {side.name: [] for side in sides}
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    before = sides[0].state()["counters"]
    equal = 0
    for repetition in range(args.repetitions):
        seed += 2
        outputs = {}
        for side in sides if repetition % 2 == 0 else reversed(sides):
            short, few = side.run(prompts_of(point, seed, args.private), FEW)
            long, many = side.run(prompts_of(point, seed + 1, args.private), args.tokens)
            if any(len(o) != FEW for o in few) or any(len(o) != args.tokens for o in many):
                raise SystemExit(f"{side.name} made another number of tokens than asked for: nothing can be compared")
            steps[side.name].append((long - short) / (args.tokens - FEW) * 1e3)
            rates[side.name].append(point.requests * args.tokens / long)
            outputs[side.name] = many
        ours, stock = (outputs[side.name] for side in sides)
        equal += sum(a == b for a, b in zip(ours, stock, strict=True))
    after = sides[0].state()["counters"]
    if args.profile is not None:
        for side in sides:
            side.trace(
                prompts_of(point, 10**6 + 1, args.private), 2 * FEW, args.profile, re.sub(r"\W+", "_", point.name)
            )
    ours, stock = (side.name for side in sides)
    ratio = [b / a for a, b in zip(steps[ours], steps[stock], strict=True)]
    rate_ratio = [a / b for a, b in zip(rates[ours], rates[stock], strict=True)]
    return {
        "point": point.name,
        "requests": point.requests,
        "prefix_tokens": [length for length, _ in point.groups],
        "step_ms": {name: round(statistics.median(values), 3) for name, values in steps.items()},
        "step_ms_range": {name: [round(min(v), 3), round(max(v), 3)] for name, v in steps.items()},
        "tokens_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "step_speedup": round(statistics.median(ratio), 3),
        "step_speedup_range": [round(min(ratio), 3), round(max(ratio), 3)],
        "rate_speedup": round(statistics.median(rate_ratio), 3),
        "rate_speedup_range": [round(min(rate_ratio), 3), round(max(rate_ratio), 3)],
        "each_step_ms": {name: [round(v, 3) for v in values] for name, values in steps.items()},
        "each_tokens_per_s": {name: [round(v, 1) for v in values] for name, values in rates.items()},
        "equal_outputs": f"{equal} of {point.requests * args.repetitions}",
        "shared_steps": after["shared_steps"] - before["shared_steps"],
        "promotions_in_timed_part": after["promotions"] - before["promotions"],
        "rank_comparisons": after["rank_comparisons"] - before["rank_comparisons"],
        "regimes": after["steps"],
    }


def _one_of_each(point: Point, private: int) -> list[tuple[list[int], int]]:
    prompts, at, result = prompts_of(point, 0, private), 0, []
    for length, members in point.groups:
        if members > 1:
            result.append((prompts[at], length + 1))
        at += members
    return result or [(prompts[0], 64)]


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "commit": args.commit or commit(),
        "gpu": torch.cuda.get_device_name(0) if cuda else "cpu",
        "model": args.model,
        "tp": args.tp,
        "stock_backend": args.stock,
        "regime": args.regime,
        "repetitions": args.repetitions,
        "output_tokens": args.tokens,
        "private_tokens": args.private,
        **{name: version(name) for name in ("sglang", "torch", "triton", "flashinfer-python")},
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with config.json; weights are dummies")
    parser.add_argument("--stock", default="flashinfer", help="the stock backend to compare with and to wrap")
    parser.add_argument(
        "--points",
        nargs="+",
        type=point_of,
        default=[point_of(name) for name in ("16x16K", "64x16K", "128x16K", "none")],
        help=f"of {', '.join(POINTS)}, or like 64x16K",
    )
    parser.add_argument("--regime", choices=REGIMES, default="auto", help="as --granikv-regime; default: auto")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--private", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, each on a device of its own")
    parser.add_argument("--pool", type=int, default=160000)
    parser.add_argument("--max-requests", type=int, default=160, help="more than any point, or one request waits")
    parser.add_argument("--commit", default="", help="commit to record; default: what git says here")
    parser.add_argument("--profile", type=Path, help="folder for a trace of one more run of each point and side")
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_decode.jsonl")
    args = parser.parse_args()
    GraniKVConfig(min_tokens=256, stock_backend=args.stock, regime=args.regime).to_env()
    sides = [
        start("granikv", args, True, attention_backend=NAME, radix_cache_backend=NAME),
        start(args.stock, args, False, attention_backend=args.stock),
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for point in args.points:
        graphs = sides[0].state().get("graphs", {})  # what the variants added to the start
        row = {**measure(point, sides, args), **provenance(args), "graphs": graphs}
        rows.append(row)
        with args.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(json.dumps(row), file=sys.stderr, flush=True)
    for side in sides:
        side.engine.shutdown()
    print("point                      step ms granikv / stock   speed-up (range)        tokens/s   speed-up   equal")
    for row in rows:
        ours, stock = row["step_ms"].values()
        low, high = row["step_speedup_range"]
        print(
            f"{row['point']:<26} {ours:>8.2f} / {stock:<8.2f}  {row['step_speedup']:>8.2f} ({low:.2f} to {high:.2f})"
            f"  {row['tokens_per_s']['granikv']:>10.0f} {row['rate_speedup']:>9.2f}   {row['equal_outputs']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
