"""What the order of a prompt's parts is worth: the same agents, document and questions in three orders, on one server.

Six agents answer two rounds of questions about one document. Each round is sent at once, from a flushed cache at the
start of the first. The orders take turns within a repetition and the turn order is reversed every time. Every answer
has the same number of tokens. Counted, not timed: prompt tokens that had to be computed, cached tokens, those of them
that were HOT, and bytes of prefix not read again. The seconds are the time until the last answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_cpu import RESULTS, provenance
from docs_tables import prompt_order_table

from granikv_sglang.core import GraniKVError
from granikv_sglang.demo.teams import TEAMS
from granikv_sglang.demo.text_library import DOCUMENT, SYSTEM
from granikv_sglang.embedded import ensure_model
from granikv_sglang.server.process import Server, free_ports, serving

PAGES = "\n## ".join(DOCUMENT.split("\n## ")[:5])
AGENTS = TEAMS[1].asks
FOLLOW_UP = "Name one more thing that your role should know."

Messages = list[dict[str, str]]


def chat(system: str, user: str) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def clock_first(role: str, question: str, clock: str) -> Messages:
    """The time comes first: no two prompts begin alike."""
    return chat(f"Request of {clock}. You are the {role}.\n{SYSTEM}\n\n{PAGES}", question)


def role_first(role: str, question: str, clock: str) -> Messages:
    """The role comes first: an agent shares with itself in the next round, but with no other agent."""
    return chat(f"You are the {role}.\n{SYSTEM}\n\n{PAGES}", f"Request of {clock}. {question}")


def common_first(role: str, question: str, clock: str) -> Messages:
    """What all have in common comes first, what is one agent's own comes last."""
    return chat(f"{SYSTEM}\n\n{PAGES}", f"You are the {role}. Request of {clock}. {question}")


ORDERS: dict[str, Callable[[str, str, str], Messages]] = {
    "time, role, document": clock_first,
    "role, document, time": role_first,
    "document, role, time": common_first,
}


def measure(server: Server, order: Callable[[str, str, str], Messages], tokens: int) -> dict[str, float]:
    """Two rounds of all agents in one order, from a flushed cache."""
    server.post("/flush_cache?timeout=30", parse=False)
    before = server.granikv_state()["counters"]
    start = time.monotonic()
    usages: list[dict[str, Any]] = []
    with ThreadPoolExecutor(len(AGENTS)) as pool:
        for follow_up in (False, True):
            prompts = [
                order(role, FOLLOW_UP if follow_up else question, f"{time.time():.6f} {i}")
                for i, (role, question) in enumerate(AGENTS)
            ]
            usages += pool.map(lambda messages: ask(server, messages, tokens), prompts)
    seconds = time.monotonic() - start
    after = server.granikv_state()["counters"]
    details = [usage["prompt_tokens_details"] or {} for usage in usages]
    cached = sum(detail.get("cached_tokens", 0) for detail in details)
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    return {
        "prompt_tokens": prompt,
        "computed_tokens": prompt - cached,
        "cached_tokens": cached,
        "hot_tokens": sum(detail.get("hot_tokens", 0) for detail in details),
        "bytes_not_reread": after["bytes_not_reread"] - before["bytes_not_reread"],
        "shared_steps": after["shared_steps"] - before["shared_steps"],
        "output_tokens": sum(usage["completion_tokens"] for usage in usages),
        "seconds": seconds,
    }


def ask(server: Server, messages: Messages, tokens: int) -> dict[str, Any]:
    """The usage of one greedy answer of exactly ``tokens`` tokens."""
    body = {"model": "default", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return dict(server.post("/v1/chat/completions", body, timeout=600)["usage"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of each answer")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "prompt_order.jsonl")
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ORDERS}
    flags = ("--model-path", str(ensure_model()), "--max-total-tokens", "32768", "--enable-cache-report")
    with tempfile.TemporaryDirectory(prefix="granikv-bench-") as folder:
        server = Server("GraniKV", free_ports(1)[0], flags, Path(folder))
        try:
            with serving(server):
                for repetition in range(args.repetitions):
                    for name in list(ORDERS)[:: 1 if repetition % 2 == 0 else -1]:
                        found[name].append(measure(server, ORDERS[name], args.tokens))
                        seconds = found[name][-1]["seconds"]
                        print(f"  {name}, repetition {repetition + 1}: {seconds:.1f} s", file=sys.stderr)
        except GraniKVError as error:
            print(f"granikv: {error}", file=sys.stderr)
            return 1
    rows = [summary(name, measured, args.repetitions) for name, measured in found.items()]
    if len({row["output_tokens"] for row in rows}) != 1:
        print("granikv: the orders made different numbers of tokens: nothing can be compared", file=sys.stderr)
        return 1
    with args.out.open("a") as out:
        for row in rows:
            out.write(json.dumps({**row, **provenance()}) + "\n")
    print(prompt_order_table(rows))
    return 0


def summary(name: str, measured: list[dict[str, float]], repetitions: int) -> dict[str, Any]:
    """Medians over the repetitions, and the range of the seconds."""
    seconds = [one["seconds"] for one in measured]
    medians = {key: statistics.median_low([one[key] for one in measured]) for key in measured[0]}
    return {
        "order": name,
        **medians,
        "seconds": round(statistics.median(seconds), 2),
        "seconds_range": [round(min(seconds), 2), round(max(seconds), 2)],
        "repetitions": repetitions,
    }


if __name__ == "__main__":
    sys.exit(main())
