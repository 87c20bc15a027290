"""How fast a side decodes, from the arrival times of its tokens. Pure functions of numbers.

Method. Only the time in which *all* requests decode is looked at: it begins when the last request gets its first token
and ends when the first request gets its last one. No prefill runs in it (every prompt has been read by then), and the
batch is the same on both sides. Both sides are then cut to the same number of tokens, the first ones of that time, and
the speed is tokens over seconds. The tokens before it, the prefills and the start of the servers count for nothing.
The rounds alternate (GraniKV, stock, stock, GraniKV), so that a machine that slows down favours neither side, and they
are put together as all tokens over all seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

METHOD = (
    "decode only: same number of tokens per side, all agents decoding, prefill excluded; order GraniKV, stock, stock, "
    "GraniKV; KV caches flushed before the first round of each"
)
STEADY = 1.5
"""Rounds whose speed-ups are further apart than this factor say more about the machine than about either side."""
FEWEST_STEPS = 4
"""With fewer steps in which all requests decode, a speed would be noise."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens received in a stretch of decoding and how long that took."""

    tokens: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


def joint_tokens(stamps: Sequence[Sequence[float]]) -> tuple[float, list[float]]:
    """Start of the time in which all requests decode, and the arrivals after it up to its end, in order.

    ``stamps`` holds, for each request, the arrival time of each of its tokens.
    """
    if not stamps or any(not times for times in stamps):
        return 0.0, []
    start = max(times[0] for times in stamps)
    end = min(times[-1] for times in stamps)
    return start, sorted(t for times in stamps for t in times if start < t <= end)


def decode_speeds(ours: Sequence[Sequence[float]], stock: Sequence[Sequence[float]]) -> tuple[Speed, Speed] | None:
    """Decode speed of both sides over the same number of tokens; None when too few steps had all requests in them."""
    requests = len(ours)
    (our_start, our_tokens), (stock_start, stock_tokens) = joint_tokens(ours), joint_tokens(stock)
    # Whole steps only: a step hands one token to each request.
    steps = min(len(our_tokens), len(stock_tokens)) // requests if requests else 0
    if steps < FEWEST_STEPS:
        return None
    count = steps * requests
    return (
        Speed(count, our_tokens[count - 1] - our_start),
        Speed(count, stock_tokens[count - 1] - stock_start),
    )


def steady(pairs: Sequence[tuple[Speed, Speed]]) -> bool:
    """Whether the rounds agree on the speed-up within :data:`STEADY`; if not, something else used the machine."""
    ratios = [ours.per_second / stock.per_second for ours, stock in pairs]
    return bool(ratios) and max(ratios) <= STEADY * min(ratios)


def total(speeds: Sequence[Speed]) -> Speed:
    """All tokens over all seconds."""
    return Speed(sum(speed.tokens for speed in speeds), sum(speed.seconds for speed in speeds))
