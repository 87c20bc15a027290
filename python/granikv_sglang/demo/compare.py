"""Are the tokens those of stock SGLang? Where they part, both servers say how close the call was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TIE_BOUND = 1e-3
"""Two log-probabilities closer than this are a tie: float32 sums in another order differ by up to about 1e-4 here."""

Top = Sequence[tuple[float, int]]
"""The most likely next tokens of one server: ``(log-probability, token id)``, best first."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which the two answers to one request part. Token None: that answer ended there."""

    at: int
    ours: int | None
    stock: int | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a difference is: a tie within :data:`TIE_BOUND`, or a fault. ``text`` says it in one line."""

    tie: bool
    text: str


def first_difference(ours: Sequence[int], stock: Sequence[int]) -> Difference | None:
    """The first position whose tokens differ; None when the answers are the same, length included."""
    for at, (a, b) in enumerate(zip(ours, stock, strict=False)):
        if a != b:
            return Difference(at, a, b)
    at = min(len(ours), len(stock))
    if len(ours) == len(stock):
        return None
    return Difference(at, ours[at] if at < len(ours) else None, stock[at] if at < len(stock) else None)


def judge(difference: Difference, ours: Top, stock: Top, bound: float = TIE_BOUND) -> Verdict:
    """Tie or fault. A tie needs both tokens to be the top two of *both* servers, with a gap below ``bound`` on both."""
    if difference.ours is None or difference.stock is None:
        return Verdict(False, f"one answer ends at token {difference.at}, the other goes on")
    wanted = {difference.ours, difference.stock}
    gaps = []
    for name, top in (("GraniKV", ours), ("stock", stock)):
        if {token for _, token in top[:2]} != wanted:
            return Verdict(False, f"tokens {sorted(wanted)} at {difference.at} are not the two most likely of {name}")
        gaps.append(abs(top[0][0] - top[1][0]))
    where = f"tokens {difference.ours} and {difference.stock} at {difference.at}"
    text = f"{where} are {gaps[0]:.1e} (GraniKV) and {gaps[1]:.1e} (stock) apart in log-probability"
    return Verdict(max(gaps) < bound, f"{text}; bound {bound:g}")
