"""Validity gates: no speed-up is printed before all of them hold. Pure functions of what both sides reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from granikv_sglang.bench_serving.workload import Tokens
from granikv_sglang.demo.compare import Difference, first_difference

STATE_TOLERANCE = 0.02
"""Share of the prompt tokens by which the cached tokens of two sides may differ: who arrives first in a cold cache is
decided by the network."""
CLOCK_TOLERANCE = 0.15
"""Relative difference of the SM clock from which two sides did not run under the same conditions. A side that uses the
matrix units more may reach the power limit and lose some per cent: that is its own cost, and no fault of the run."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's fate on one side. ``wanted`` is the output tokens asked for, ``cached`` prompt tokens found."""

    rid: str
    prompt: Tokens | str
    prompt_len: int
    wanted: int
    token_ids: Tokens
    ok: bool
    error: str = ""
    cached: int = 0
    retractions: int = 0


@dataclass(frozen=True)
class Turn:
    """One repetition of one side. ``state`` names the cache state it began with; ``clocks`` as machine.Clocks says."""

    side: str
    repetition: int
    state: str
    answers: tuple[Answer, ...]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    clocks: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gate:
    """One check: its name, whether it holds, and what was found."""

    name: str
    ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class Parting:
    """A request whose tokens part, and what asking both servers about it gave."""

    rid: str
    repetition: int
    difference: Difference
    tie: bool
    text: str


def differences(ours: Turn, stock: Turn) -> list[tuple[Answer, Difference]]:
    """Requests that finished on both sides with other tokens: our answer, and where the two part."""
    theirs = {answer.rid: answer for answer in stock.answers}
    found = []
    for answer in ours.answers:
        other = theirs.get(answer.rid)
        if other is None or not (answer.ok and other.ok):
            continue
        difference = first_difference(answer.token_ids, other.token_ids)
        if difference is not None:
            found.append((answer, difference))
    return found


def judge_all(
    ours: Sequence[Turn], stock: Sequence[Turn], partings: Sequence[Parting], *, exact_lengths: bool
) -> list[Gate]:
    """Every gate over all repetitions of two sides (in the same order). ``exact_lengths``: an answer ends nowhere but
    at the length asked for."""
    pairs = list(zip(ours, stock, strict=True))
    return [
        _tokens(pairs, exact_lengths),
        _finished(pairs),
        _outputs(pairs, partings),
        _retractions(pairs),
        _state(pairs),
        _clocks(pairs),
    ]


def _tokens(pairs: Sequence[tuple[Turn, Turn]], exact: bool) -> Gate:
    name = "output tokens"
    totals = [tuple(sum(len(a.token_ids) for a in turn.answers) for turn in pair) for pair in pairs]
    for number, (ours, stock) in enumerate(totals):
        if ours != stock:
            return Gate(name, False, f"repetition {number + 1}: {ours} against {stock}")
    if exact:
        for pair in pairs:
            for turn in pair:
                short = [a for a in turn.answers if len(a.token_ids) != a.wanted]
                if short:
                    text = f"{turn.side}, {short[0].rid}: {len(short[0].token_ids)} tokens, {short[0].wanted} asked for"
                    return Gate(name, False, f"{text} ({len(short)} such requests)")
    made = sum(ours for ours, _ in totals)
    return Gate(name, made > 0, f"{made} on each side" if made else "none on either side")


def _finished(pairs: Sequence[tuple[Turn, Turn]]) -> Gate:
    name = "finished requests"
    for ours, stock in pairs:
        done = [{a.rid for a in turn.answers if a.ok} for turn in (ours, stock)]
        failed = [a for turn in (ours, stock) for a in turn.answers if not a.ok]
        if done[0] != done[1] or not done[0]:
            why = f"; {failed[0].error}" if failed else ""
            text = f"repetition {ours.repetition + 1}: {len(done[0])} against {len(done[1])}{why}"
            return Gate(name, False, text)
    finished = sum(a.ok for ours, _ in pairs for a in ours.answers)
    asked = sum(len(ours.answers) for ours, _ in pairs)
    return Gate(name, True, f"the same {finished} of {asked} on both sides")


def _outputs(pairs: Sequence[tuple[Turn, Turn]], partings: Sequence[Parting]) -> Gate:
    name = "outputs"
    compared = sum(len(ours.answers) for ours, _ in pairs)
    found = sum(len(differences(*pair)) for pair in pairs)
    wrong = [parting for parting in partings if not parting.tie]
    if wrong:
        first = wrong[0]
        text = f"{len(wrong)} of {compared} differ for no tie; {first.rid}, repetition {first.repetition + 1}"
        return Gate(name, False, f"{text}: {first.text}")
    if found != len(partings):
        return Gate(name, False, f"{found} of {compared} differ, only {len(partings)} of them could be explained")
    ties = f", {found} part at a logit tie" if found else ""
    return Gate(name, True, f"{compared - found} of {compared} equal{ties}")


def _retractions(pairs: Sequence[tuple[Turn, Turn]]) -> Gate:
    name = "retractions"
    ours, stock = (sum(a.retractions for pair in pairs for a in pair[side].answers) for side in (0, 1))
    if bool(ours) != bool(stock):
        return Gate(name, False, f"{ours} against {stock}: one side ran out of KV slots; raise --max-total-tokens")
    return Gate(name, True, f"{ours} against {stock}" if ours else "none on either side")


def _state(pairs: Sequence[tuple[Turn, Turn]]) -> Gate:
    name = "cache state"
    names = {turn.state for pair in pairs for turn in pair}
    if len(names) != 1:
        return Gate(name, False, f"not the same on both sides: {', '.join(sorted(names))}")
    (state,) = names
    shares = []
    for ours, stock in pairs:
        prompt = sum(a.prompt_len for a in ours.answers)
        cached = [sum(a.cached for a in turn.answers) for turn in (ours, stock)]
        if abs(cached[0] - cached[1]) > STATE_TOLERANCE * prompt:
            text = (
                f"repetition {ours.repetition + 1}: {cached[0]} prompt tokens came from the cache against {cached[1]}"
            )
            return Gate(name, False, f"{state}; {text}")
        shares.append(cached[0] / prompt if prompt else 0.0)
    return Gate(name, True, f"{state}; {sum(shares) / len(shares):.0%} of the prompt tokens cached on both sides")


def _clocks(pairs: Sequence[tuple[Turn, Turn]]) -> Gate:
    name = "clocks"
    if any(not turn.clocks for pair in pairs for turn in pair):
        return Gate(name, False, "not recorded: neither nvidia-smi nor the kernel tells them")
    sm = [[turn.clocks["sm_mhz"] for turn in side if "sm_mhz" in turn.clocks] for side in zip(*pairs, strict=True)]
    if not all(sm):
        return Gate(name, True, "recorded with every repetition")
    low, high = sorted(sum(values) / len(values) for values in sm)
    if high - low > CLOCK_TOLERANCE * high:
        return Gate(name, False, f"SM clock {low:.0f} MHz on one side, {high:.0f} MHz on the other")
    return Gate(name, True, f"SM clock {low:.0f} to {high:.0f} MHz")
