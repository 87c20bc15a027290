"""CPU decode benchmark: requests on one shared prefix, GraniKV against stock torch_native, A B A B in one run.

Both servers are up from start to end and take turns; the one that waits sleeps. Each repetition has fresh private
parts. The prefix is warm on both sides: one request reads it before the clock matters. Timed is only the time in which
all requests decode (``granikv_sglang.demo.measure``); the control without sharing runs in the same way. Tokens are
compared before any speed is printed. Prints a table last and writes JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from granikv_sglang.core import GraniKVError
from granikv_sglang.demo.client import Answer, ask_all
from granikv_sglang.demo.measure import decode_speeds
from granikv_sglang.demo.servers import Server, free_ports, wait_ready
from granikv_sglang.demo.teams import TEAMS, Agent
from granikv_sglang.embedded import ensure_model

RESULTS = Path(__file__).parent / "results"
COMMON = ("--dtype", "float32", "--max-total-tokens", "49152", "--sleep-on-idle", "--chunked-prefill-size", "2048")


@dataclass(frozen=True)
class Case:
    """``shared`` tokens common to all requests, ``private`` tokens of each; the control shares nothing."""

    name: str
    shared: int
    private: int
    requests: int


def agents_of(case: Case, text: list[int], tokenizer: Any, seed: int) -> list[Agent]:
    """Prompts of a case. Private parts start with a random word, so that no repetition meets another's cache."""
    rng = random.Random(seed)
    prefix = text[: case.shared]
    agents = []
    for place in range(case.requests):
        start = rng.randrange(len(text) - case.private)
        own = [rng.randrange(1000, 40000), *text[start : start + case.private - 1]]
        agents.append(Agent(case.name, place, str(place), "", tokenizer.decode(prefix + own)))
    return agents


async def measure(server: Server, agents: list[Agent], tokens: int) -> list[Answer]:
    """One repetition on one server."""
    answers = (await ask_all(server, agents, tokens, lambda _: None, lambda _: None)).answers
    await asyncio.to_thread(server.post, "/flush_cache?timeout=30", parse=False)
    return answers


def compare(ours: list[Answer], stock: list[Answer]) -> int:
    """Requests whose greedy tokens are equal. The count of tokens must be; a late near-tie may part two runs."""
    for mine, theirs in zip(ours, stock, strict=True):
        if len(mine.token_ids) != len(theirs.token_ids):
            raise GraniKVError("the two sides made different numbers of tokens: no speed can be compared")
    return sum(mine.token_ids == theirs.token_ids for mine, theirs in zip(ours, stock, strict=True))


def run_case(
    case: Case, ours: Server, stock: Server, text: list[int], tokenizer: Any, args: argparse.Namespace
) -> dict:
    ratios, speeds, equal = [], [], 0
    for repetition in range(args.repetitions):
        agents = agents_of(case, text, tokenizer, seed=1000 * repetition + case.requests)
        # A B, then B A: neither side is always the one that comes second.
        order = (ours, stock) if repetition % 2 == 0 else (stock, ours)
        answers = {side.name: asyncio.run(measure(side, agents, args.tokens)) for side in order}
        equal += compare(answers[ours.name], answers[stock.name])
        pair = decode_speeds(*([a.stamps for a in answers[side.name]] for side in (ours, stock)))
        if pair is None:
            raise GraniKVError("too few steps in which all requests decode; ask for more --tokens")
        speeds.append([round(p.per_second, 2) for p in pair])
        ratios.append(pair[0].per_second / pair[1].per_second)
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
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    return {
        "commit": git.stdout.strip(),
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
    parser.add_argument("--tokens", type=int, default=24, help="output tokens of each request")
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
            wait_ready(servers, lambda _: None)
            wanted = [case for case in cases if args.case in (None, case.name)]
            rows = [run_case(case, *servers, text, tokenizer, args) for case in wanted]
        except GraniKVError as error:
            print(f"granikv: {error}", file=sys.stderr)
            return 1
        finally:
            for server in servers:
                server.stop()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as out:
        for row in rows:
            out.write(json.dumps({**row, **provenance()}) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
