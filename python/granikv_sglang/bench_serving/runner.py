"""The comparison itself: every point, repetition and side in turn, A B A B, equal cache state, fresh prompts."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from granikv_sglang.bench_serving import machine
from granikv_sglang.bench_serving.gates import Answer, Parting, Turn, differences
from granikv_sglang.bench_serving.id_requests import IdOutput, IdRequests
from granikv_sglang.bench_serving.sides import Side
from granikv_sglang.bench_serving.upstream import drive, metrics_of
from granikv_sglang.bench_serving.workload import Ask, Tokens, Workload
from granikv_sglang.core import GraniKVError
from granikv_sglang.demo.compare import judge
from granikv_sglang.demo.measure import joint_tokens
from granikv_sglang.demo.progress import Progress

WARMUP_OUTPUT = 8
"""Output tokens of the unmeasured pass that lets every kernel and shape be seen once."""
SHOWN = ("ttft", "tpot", "itl")


@dataclass(frozen=True)
class Point:
    """One load to measure. ``load`` gives the workload of a repetition; ``facts`` goes into the results."""

    name: str
    load: Callable[[int], Workload]
    facts: Mapping[str, Any]
    state: str


@dataclass(frozen=True)
class Settings:
    """How points are measured; ``tie_bound`` in units of log-probability."""

    options: argparse.Namespace
    repetitions: int
    tie_bound: float
    stream_interval: int
    one_at_a_time: bool
    gpu: bool


class BrokenOff(GraniKVError):
    """A run that ended before its time. ``outputs`` holds the records of the requests that came back before that."""

    def __init__(self, text: str, outputs: Sequence[IdOutput]) -> None:
        super().__init__(text)
        self.outputs = tuple(outputs)


class Listener(Protocol):
    """Who keeps results as they come."""

    def turn(self, point: Point, turn: Turn) -> None: ...


@dataclass
class Runner:
    """Measures points on sides; the first side is the baseline when there are several."""

    sides: Sequence[Side]
    settings: Settings
    progress: Progress
    listener: Listener
    log: TextIO
    _warm: set[tuple[str, str, int]] = field(default_factory=set)
    _frozen: dict[tuple[str, int], bool] = field(default_factory=dict)

    @property
    def collectors(self) -> dict[str, str]:
        """Of each side that has been measured: whether Python's garbage collector was frozen there."""
        return {name: "frozen" if frozen else "as it is" for (name, _), frozen in self._frozen.items()}

    def measure(self, point: Point) -> tuple[list[list[Turn]], list[list[Parting]]]:
        """Turns of each side, by repetition, and for each side but the first where its tokens part from the first's.

        Raises GraniKVError when a server goes away; turns that ended before that have reached the listener.
        """
        turns: list[list[Turn]] = [[] for _ in self.sides]
        for repetition in range(self.settings.repetitions):
            said: dict[str, Tokens] = {}
            # A B A B: the baseline comes first in each repetition.
            for place, side in enumerate(self.sides):
                self._phase(f"{point.name}, {side.name} {repetition + 1}/{self.settings.repetitions}")
                turn = self._turn(side, point, repetition, said)
                self.listener.turn(point, turn)
                turns[place].append(turn)
        self._phase(f"{point.name}, comparing tokens")
        return turns, [self._partings(place, turns) for place in range(1, len(self.sides))]

    def _turn(self, side: Side, point: Point, repetition: int, said: dict[str, Tokens]) -> Turn:
        self._bring_up(side)
        try:
            self._kernels(side, point)
            self._freeze(side)
            load = point.load(repetition)
            self._prepare(side, point, repetition, load)
            before = side.state().get("counters", {})
            with machine.Clocks(self.settings.gpu) as clocks:
                asks, outputs, seconds = self._send(side, load, said)
            state = side.state()
        except GraniKVError as error:
            where = f"{side.name}, {point.name}, repetition {repetition + 1}"
            came_back = error.outputs if isinstance(error, BrokenOff) else ()
            raise BrokenOff(f"{where}: {error}{side.last_words()}", came_back) from error
        metrics = measures(asks, outputs, seconds, streamed=not self.settings.options.disable_stream)
        grown = growth(before, state.get("counters", {}))
        if state:
            grown["hot_tokens_at_end"] = state["hot_tokens"]
        return Turn(side.name, repetition, point.state, _answers(asks, outputs), metrics, clocks.summary, grown)

    def _bring_up(self, side: Side) -> None:
        if self.settings.one_at_a_time:
            for other in self.sides:
                if other is not side:
                    other.down()
        side.up(lambda _new: self.progress.tick())

    def _kernels(self, side: Side, point: Point) -> None:
        """One short unmeasured pass on each side for each point, with private parts that never come again."""
        key = (side.name, point.name, side.starts)
        if self.settings.options.warmup_requests > 0 and key not in self._warm:
            self._warm.add(key)
            side.flush()
            self._send(side, point.load(-1), {}, WARMUP_OUTPUT)

    def _freeze(self, side: Side) -> None:
        """Once for each server, warmed up: a collector's half second falls on one side of a comparison or the other."""
        key = (side.name, side.starts)
        if key not in self._frozen:
            self._frozen[key] = side.freeze_collector()

    def _prepare(self, side: Side, point: Point, repetition: int, load: Workload) -> None:
        """Bring the cache into ``point.state``: the same steps on every side."""
        side.flush()
        if point.state == "warm":
            for prefix in load.prefixes:
                side.generate(prefix, 1)
        elif point.state == "steady":
            self._send(side, point.load(-2 - repetition), {})

    def _send(
        self, side: Side, load: Workload, said: dict[str, Tokens], most: int | None = None
    ) -> tuple[list[Ask], list[IdOutput], float]:
        """All turns of a workload: requests, records, and seconds from first request to last token, turns added up.

        ``said`` holds answers that the next turn reads. The side that comes first in a repetition fills it, the others
        read the same, so that all sides get the same prompts.
        """
        options = argparse.Namespace(**{**vars(self.settings.options), "output_file": os.devnull})
        sent: list[Ask] = []
        requester = IdRequests(
            options,
            self.settings.stream_interval,
            timed=options.use_trace_timestamps,
            slowdown=options.mooncake_slowdown_factor,
            on_tokens=self._ticker(),
        )
        seconds = 0.0
        for turn in load.turns:
            asks = turn(said)
            if most is not None:
                asks = tuple(Ask(a.rid, a.group, a.prompt, a.prompt_len, min(most, a.output_len)) for a in asks)
            begin = len(requester.outputs)
            try:
                with machine.collector_held():
                    drive(options, side.url, asks, requester, self.log)
            except GraniKVError as error:
                raise BrokenOff(str(error), requester.outputs) from error
            fresh = requester.outputs[begin:]
            sent += asks
            ends = [output.start_time + output.latency for output in fresh if output.success]
            seconds += max(ends) - min(output.start_time for output in fresh if output.success)
            for output in fresh:
                if not output.success and len(load.turns) > 1:
                    raise GraniKVError(f"{output.rid} failed, and the next turn reads its answer: {output.error}")
                said.setdefault(output.rid, tuple(output.token_ids))
        return sent, requester.outputs, seconds

    def _partings(self, place: int, turns: Sequence[Sequence[Turn]]) -> list[Parting]:
        """Every request whose tokens differ from the baseline's, judged by asking both servers about that token."""
        open_questions = [
            (ours, answer, difference)
            for ours, stock in zip(turns[place], turns[0], strict=True)
            for answer, difference in differences(ours, stock)
        ]
        tops: list[list[Any]] = []
        for side in (self.sides[place], self.sides[0]):
            if open_questions:
                self._bring_up(side)
            tops.append(
                [
                    side.top_two([*answer.prompt, *answer.token_ids[: difference.at]])
                    for _, answer, difference in open_questions
                    if not isinstance(answer.prompt, str)
                ]
            )
        if any(isinstance(answer.prompt, str) for _, answer, _ in open_questions):
            return []  # no ids to ask about: the gate says that nothing explains the difference
        partings = []
        for (turn, answer, difference), mine, theirs in zip(open_questions, *tops, strict=True):
            verdict = judge(difference, mine, theirs, self.settings.tie_bound)
            partings.append(Parting(answer.rid, turn.repetition, difference, verdict.tie, verdict.text))
        return partings

    def _ticker(self) -> Callable[[int], None]:
        """Keeps the bar's clock moving, twice a second: drawing it at every token would be measured too."""
        last = time.monotonic()

        def tick(_new: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= 0.5:
                last = now
                self.progress.tick()

        return tick

    def _phase(self, text: str) -> None:
        self.progress.advance()
        self.progress.phase(text)


def steps_of(points: int, sides: int, repetitions: int) -> int:
    """How often a runner advances the progress bar."""
    return points * (sides * repetitions + 1)


def measures(asks: Sequence[Ask], outputs: Sequence[IdOutput], seconds: float, *, streamed: bool) -> dict[str, Any]:
    """The numbers of one turn. Times in milliseconds; None where they cannot be seen, as TTFT without streaming.

    Throughput and latencies are SGLang's own metrics. ``decode_throughput`` is tokens per second over the time in which
    all requests of the turn decode: from the last first token to the first last one.
    """
    theirs = metrics_of(asks, outputs, seconds)
    found: dict[str, Any] = {
        "seconds": seconds,
        "requests": len(asks),
        "completed": theirs.completed,
        "input_tokens": theirs.total_input,
        "output_tokens": theirs.total_output,
        "output_throughput": theirs.output_throughput,
        "request_throughput": theirs.request_throughput,
        "cached_tokens": sum(output.cached_tokens for output in outputs),
        "hot_hit_tokens": sum(output.hot for output in outputs),
        "retractions": sum(output.retractions for output in outputs),
    }
    for name in SHOWN:
        for kind in ("mean", "median", "p99"):
            value = float(getattr(theirs, f"{kind}_{name}_ms"))
            found[f"{kind}_{name}_ms"] = value if streamed else None
    start, stamps = joint_tokens([output.stamps for output in outputs if output.success])
    found["decode_throughput"] = len(stamps) / (stamps[-1] - start) if streamed and len(stamps) > 1 else None
    return found


def growth(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What every counter grew by, nested as they are; those that did not move are left out."""
    grown: dict[str, Any] = {}
    for key, value in after.items():
        if isinstance(value, Mapping):
            inner = growth(before.get(key, {}), value)
            if inner:
                grown[key] = inner
        elif isinstance(value, int) and value != before.get(key, 0):
            grown[key] = value - before.get(key, 0)
    return grown


def _answers(asks: Sequence[Ask], outputs: Sequence[IdOutput]) -> tuple[Answer, ...]:
    """An answer for each request, in the order asked; one that has no record never came back."""
    by_rid = {output.rid: output for output in outputs}
    answers = []
    for ask in asks:
        output = by_rid.get(ask.rid, IdOutput(error="no record of this request"))
        answers.append(
            Answer(
                ask.rid,
                ask.prompt,
                ask.prompt_len,
                ask.output_len,
                tuple(output.token_ids),
                output.success,
                output.error,
                output.cached_tokens,
                output.retractions,
            )
        )
    return tuple(answers)


def scratch(folder: Path) -> TextIO:
    """Where SGLang's own output of each run goes."""
    return (folder / f"sglang-bench-{int(time.time())}.log").open("w")
