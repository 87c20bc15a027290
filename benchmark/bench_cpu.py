"""CPU decode benchmark: requests on one shared prefix, GraniKV against stock torch_native, A B, B A in one run.

Both servers are up from start to end and take turns; the one that waits sleeps. Each repetition has fresh private
parts. The prefix is warm on both sides: one request reads it before the others come. Timed is decode alone, by SGLang's
own scheduler: its log says every few steps how many tokens a second it makes; only lines between which all requests
decoded count. Answers are not streamed, so that no HTTP traffic competes for the cores with what is measured. The
control without sharing runs in the same way. Tokens are compared before any speed is printed. Prints a table last and
writes JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from granikv_sglang.core import GraniKVError, commit
from granikv_sglang.demo.teams import TEAMS
from granikv_sglang.embedded import ensure_model
from granikv_sglang.server.process import Server, free_ports, serving

RESULTS = Path(__file__).parent / "results"
COMMON = ("--dtype", "float32", "--max-total-tokens", "49152", "--decode-log-interval", "8")


@dataclass(frozen=True)
class Case:
    """``shared`` tokens common to all requests, ``private`` tokens of each; the control shares nothing."""

    name: str
    shared: int
    private: int
    requests: int


def prompts_of(case: Case, text: list[int], seed: int) -> list[list[int]]:
    """Token ids of a repetition. Private parts start with a random word: no repetition meets another's cache."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(case.requests):
        start = rng.randrange(len(text) - case.private)
        prompts.append([*text[: case.shared], rng.randrange(1000, 40000), *text[start : start + case.private - 1]])
    return prompts


@dataclass(frozen=True)
class Measured:
    """Decode speed of one repetition in tokens per second, and the tokens made."""

    speed: float
    outputs: list[list[int]]


def measure(server: Server, case: Case, prompts: list[list[int]], tokens: int) -> Measured:
    """One repetition on one server, from a flushed cache. Raises GraniKVError when too little of it was pure decode."""
    server.post("/flush_cache?timeout=30", parse=False)
    if case.shared:
        generate(server, prompts[0][: case.shared + 1], 1)
    seen = len(server.log.read_text(errors="replace"))
    with ThreadPoolExecutor(len(prompts)) as pool:
        outputs = list(pool.map(lambda prompt: generate(server, prompt, tokens), prompts))
    log = server.log.read_text(errors="replace")[seen:]
    lines = re.findall(r"(Prefill|Decode) batch, .*?#running-req: (\d+).*?throughput \(token/s\): ([\d.]+)", log)
    # A line's interval starts at the line before it: only one that follows a decode line of the full batch is pure.
    pure = [
        float(speed)
        for (before, full, _), (kind, running, speed) in pairwise(lines)
        if before == kind == "Decode" and int(full) == int(running) == case.requests
    ]
    if len(pure) < 2:
        raise GraniKVError("too few steps in which all requests decode; ask for more --tokens")
    return Measured(statistics.median(pure), outputs)


def generate(server: Server, prompt: list[int], tokens: int) -> list[int]:
    """Greedy output tokens of one request, in one answer."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    reply = server.post("/generate", {"input_ids": prompt, "sampling_params": params}, timeout=600)
    return list(reply["output_ids"])


def run_case(case: Case, ours: Server, stock: Server, text: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """All repetitions of one case."""
    ratios, speeds, equal = [], [], 0
    for repetition in range(args.repetitions):
        prompts = prompts_of(case, text, seed=1000 * repetition + case.requests)
        # A B, then B A: neither side is always the one that comes second.
        order = (ours, stock) if repetition % 2 == 0 else (stock, ours)
        done = {side.name: measure(side, case, prompts, args.tokens) for side in order}
        mine, theirs = done[ours.name], done[stock.name]
        if any(len(output) != args.tokens for output in (*mine.outputs, *theirs.outputs)):
            raise GraniKVError("a side made another number of tokens than asked for: no speed can be compared")
        equal += sum(a == b for a, b in zip(mine.outputs, theirs.outputs, strict=True))
        speeds.append([mine.speed, theirs.speed])
        ratios.append(mine.speed / theirs.speed)
        print(
            f"  {case.name} repetition {repetition + 1}: {speeds[-1]} tokens/s, ratio {ratios[-1]:.2f}", file=sys.stderr
        )
    return {
        "case": case.name,
        "requests": case.requests,
        "shared_tokens": case.shared,
        "private_tokens": case.private,
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "granikv_tokens_per_s": statistics.median(s[0] for s in speeds),
        "stock_tokens_per_s": statistics.median(s[1] for s in speeds),
        "requests_equal": equal,
        "requests_compared": case.requests * args.repetitions,
        "repetitions": args.repetitions,
        "output_tokens": args.tokens,
    }


def provenance() -> dict[str, Any]:
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    return {
        "commit": commit(),
        "cpu": cpu,
        "threads": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in ("sglang", "torch", "granikv-sglang")},
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["case            requests  shared  granikv tok/s  stock tok/s  ratio (range)        tokens equal"]
    for row in rows:
        low, high = row["ratio_range"]
        lines.append(
            f"{row['case']:<15} {row['requests']:>8} {row['shared_tokens']:>7} {row['granikv_tokens_per_s']:>14.1f} "
            f"{row['stock_tokens_per_s']:>12.1f}  {row['ratio_median']:.2f} ({low:.2f} to {high:.2f})  "
            f"{row['requests_equal']} of {row['requests_compared']}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--shared", type=int, default=2048, help="tokens of the common prefix")
    parser.add_argument("--tokens", type=int, default=42, help="output tokens of each request")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--case", choices=("shared", "nothing shared"), default=None, help="run one case only")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_cpu.jsonl")
    args = parser.parse_args()
    model = ensure_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = [token for team in TEAMS for token in tokenizer(team.prefix)["input_ids"]]
    cases = [
        Case("shared", args.shared, 32, args.requests),
        Case("nothing shared", 0, 256, max(2, args.requests // 2)),
    ]
    ports = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="granikv-bench-") as folder:
        servers = [
            Server("GraniKV", ports[0], ("--model-path", str(model), *COMMON), Path(folder)),
            Server("stock", ports[1], ("--model-path", str(model), *COMMON, "--granikv-off"), Path(folder)),
        ]
        try:
            with serving(*servers):
                wanted = [case for case in cases if args.case in (None, case.name)]
                rows = [run_case(case, *servers, text, args) for case in wanted]
        except GraniKVError as error:
            print(f"granikv: {error}", file=sys.stderr)
            return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as out:
        for row in rows:
            out.write(json.dumps({**row, **provenance()}) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
