"""The demo from start to end: two servers, one set of requests, one comparison."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from granikv_sglang.core import GraniKVError
from granikv_sglang.demo import report
from granikv_sglang.demo.client import MODEL, Answer, Round, ask_all, top_two, warm_up
from granikv_sglang.demo.compare import Verdict, first_difference, judge
from granikv_sglang.demo.measure import decode_speeds, steady, total
from granikv_sglang.demo.progress import Progress
from granikv_sglang.demo.teams import TEAMS, Agent, roster
from granikv_sglang.embedded import EmbeddedModelError, ensure_model
from granikv_sglang.server.process import MILESTONES, Server, free_ports, stop_all, wait_ready

# Same for both sides. float32 is named because SGLang makes float16 of a float32 checkpoint otherwise: slower on a CPU,
# and far noisier. The pool holds both teams twice over. An idle server sleeps: the other side has the cores to itself.
COMMON_FLAGS = ("--dtype", "float32", "--max-total-tokens", "16384", "--sleep-on-idle", "--served-model-name", MODEL)
ROUNDS = 2
"""Of each side. Order: GraniKV, stock, stock, GraniKV; only the first of a side has to read the long prefixes."""
SIDES: tuple[tuple[str, tuple[str, ...]], ...] = (("GraniKV", ()), ("stock", ("--granikv-off",)))


class DemoFailed(GraniKVError):
    """The demo ran to its end and did not show what it must show."""


@dataclass(frozen=True)
class Options:
    """Command line of the demo."""

    per_team: int
    max_tokens: int
    json_only: bool


def run(options: Options) -> int:
    """Run the demo and print its results; returns the exit code. Raises GraniKVError with a message for the user."""
    begin = time.perf_counter()
    try:
        ensure_model()
    except EmbeddedModelError as error:
        raise GraniKVError(str(error)) from error
    folder = Path(tempfile.mkdtemp(prefix="granikv-demo-"))
    servers: list[Server] = []
    keep_logs = False
    try:
        if not options.json_only:
            print(report.introduction(options.per_team, options.max_tokens), flush=True)
        # A start counts as much as the tokens of half a side: about what it takes.
        tokens = len(TEAMS) * options.per_team * options.max_tokens
        milestone = max(1, tokens // (2 * len(MILESTONES)))
        with Progress(2 * (milestone * len(MILESTONES) + ROUNDS * tokens)) as progress:
            progress.phase("starting two servers")
            for (name, flags), port in zip(SIDES, free_ports(len(SIDES)), strict=True):
                servers.append(Server(name, port, (*COMMON_FLAGS, *flags), folder))

            def waiting(milestones: int) -> None:
                progress.advance(milestones * milestone)
                progress.tick()

            wait_ready(servers, waiting)
            outcome = asyncio.run(_both_rounds(servers[0], servers[1], options, progress))
            progress.phase("stopping the servers")
            progress.finish()
            stop_all(servers)
        return _print_results(outcome, options, time.perf_counter() - begin)
    except DemoFailed:
        raise
    except OSError as error:
        keep_logs = True
        raise GraniKVError(f"a server did not answer: {error}; logs: {folder}") from error
    except GraniKVError:
        # The message names a log in this folder.
        keep_logs = True
        raise
    finally:
        stop_all(servers)
        if not keep_logs:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Outcome:
    """The rounds of both sides, what GraniKV's counters grew by in its first, and verdicts where tokens differ."""

    ours: list[Round]
    stock: list[Round]
    delta: dict[str, Any]
    verdicts: list[tuple[Answer, Verdict]]


async def _both_rounds(ours: Server, stock: Server, options: Options, progress: Progress) -> Outcome:
    agents = roster(options.per_team)

    def say(answer: Answer) -> None:
        if not options.json_only:
            progress.say(report.transcript_entry(answer))

    async with _ticking(progress):
        progress.phase("warm-up")
        for server in (ours, stock):
            await warm_up(server)
        before = await asyncio.to_thread(ours.granikv_state)
        our_rounds = [await _round(ours, agents, options, progress, say)]
        after = await asyncio.to_thread(ours.granikv_state)
        stock_rounds = [await _round(stock, agents, options, progress, _silent) for _ in range(ROUNDS)]
        our_rounds.append(await _round(ours, agents, options, progress, _silent))
        progress.phase("comparing tokens")
        verdicts = []
        for pair in zip(our_rounds, stock_rounds, strict=True):
            verdicts += await asyncio.to_thread(_verdicts, ours, stock, *pair)
    delta = report.counters_between(before.get("counters", {}), after.get("counters", {}))
    return Outcome(our_rounds, stock_rounds, delta, verdicts)


def _silent(_answer: Answer) -> None:
    """The transcript shows one round of one side; the others must be the same."""


async def _round(
    server: Server,
    agents: list[Agent],
    options: Options,
    progress: Progress,
    on_answer: Callable[[Answer], None],
) -> Round:
    done = 0

    def on_token(new: int) -> None:
        nonlocal done
        done += new
        progress.advance(new)
        progress.phase(f"{server.name}: {done}/{len(agents) * options.max_tokens} tokens")

    # Reading the prompts takes most of the wait for the first token.
    progress.phase(f"{server.name}: reading prompts")
    return await ask_all(server, agents, options.max_tokens, on_token, on_answer)


def _verdicts(ours: Server, stock: Server, our_round: Round, stock_round: Round) -> list[tuple[Answer, Verdict]]:
    """A verdict for each request whose tokens differ, with both servers asked about the place where they part."""
    found = []
    for mine, theirs in zip(our_round.answers, stock_round.answers, strict=True):
        difference = first_difference(mine.token_ids, theirs.token_ids)
        if difference is not None:
            so_far = [*mine.prompt_ids, *mine.token_ids[: difference.at]]
            found.append((mine, judge(difference, top_two(ours, so_far), top_two(stock, so_far))))
    return found


def _print_results(outcome: Outcome, options: Options, seconds: float) -> int:
    first = outcome.ours[0]
    pairs = [
        decode_speeds(*([answer.stamps for answer in side.answers] for side in pair))
        for pair in zip(outcome.ours, outcome.stock, strict=True)
    ]
    speeds = [pair for pair in pairs if pair is not None]
    ties = sum(verdict.tie for _, verdict in outcome.verdicts)
    equal = ties == len(outcome.verdicts)
    tokens = sum(len(answer.token_ids) for answer in first.answers)
    ours, stock = (total(side) for side in zip(*speeds, strict=True)) if speeds else (None, None)
    shared_steps = int(outcome.delta.get("shared_steps", 0))
    summary = {
        "requests": len(first.answers),
        "rounds": ROUNDS,
        "prefix_groups": len(report.groups(first.snapshot)),
        "hot_tokens": int(first.snapshot.get("hot_tokens", 0)),
        "shared_steps": shared_steps,
        "tokens_equal_to_stock": equal,
        "prefix_bytes_not_reread": int(outcome.delta.get("bytes_not_reread", 0)),
        "decode_speedup_vs_stock": round(ours.per_second / stock.per_second, 2) if ours and stock else None,
        "decode_speedup_by_round": [round(a.per_second / b.per_second, 2) for a, b in speeds],
        "decode_speedup_steady": steady(speeds),
        "decode_tokens_per_second": [round(side.per_second, 1) for side in (ours, stock) if side],
        "ties": ties,
        "output_tokens": tokens,
        "versions": {
            "python": python_version(),
            **{name: version(name) for name in ("granikv-sglang", "sglang", "torch", "openai")},
        },
        "seconds": round(seconds, 1),
    }
    if not options.json_only:
        print(report.hot_report(first.snapshot, outcome.delta))
        print(
            report.speed_report(
                speeds, [(a.seconds, b.seconds) for a, b in zip(outcome.ours, outcome.stock, strict=True)]
            )
        )
        print(report.equality_report(ROUNDS * len(first.answers), ROUNDS * tokens, outcome.verdicts))
        print()
    print(json.dumps(summary), flush=True)
    if not equal:
        raise DemoFailed("tokens differ from stock SGLang beyond a tie; the lines above say where")
    if not shared_steps:
        raise DemoFailed("no decode step read a shared prefix once: GraniKV did nothing")
    return 0


@contextlib.asynccontextmanager
async def _ticking(progress: Progress) -> AsyncIterator[None]:
    """Keeps the bar's clock moving while the servers work."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.5)
            progress.tick()

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()
