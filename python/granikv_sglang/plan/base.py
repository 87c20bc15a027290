"""What the host decides about one forward pass, as plain values. Backends read a Plan; they never see the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from granikv_sglang.core import Bound, Reason, Regime, Span

Path = Sequence[tuple[int, Span]]
"""The HOT nodes of one request, ``(node id, span)``, root first."""


@dataclass(frozen=True, slots=True)
class Item:
    """One contiguous stretch of shared prefix and the batch rows that share it: read once for all of them."""

    start: int
    tokens: int
    rows: tuple[int, ...]
    node_id: int

    @property
    def tokens_not_reread(self) -> int:
        return self.tokens * (len(self.rows) - 1)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest plan an engine's fixed buffers hold: batch rows, items, and (item, member) pairs."""

    rows: int
    items: int
    pairs: int

    def holds(self, rows: int, items: Sequence[Item]) -> bool:
        """Whether a plan of ``items`` for a batch of ``rows`` fits."""
        pairs = sum(len(item.rows) for item in items)
        return rows <= self.rows and len(items) <= self.items and pairs <= self.pairs


class Decision(NamedTuple):
    """The regime of one forward pass and why it was chosen.

    ``predicted_us`` is the time of one attention layer under each regime that was weighed, as of when the plan was
    classified; empty where none was.
    """

    regime: Regime
    reason: Reason
    bound: Bound = Bound.NONE
    predicted_us: tuple[tuple[Regime, float], ...] = ()


@dataclass(frozen=True)
class Plan:
    """Host plan of one decode pass.

    Attributes:
        decision: regime and reason; ``items`` is empty exactly when the regime is UNIFORM.
        items: forest of shared stretches; a row's items together cover a leading span of its tokens.
        coverage: int32 ``[rows]``, tokens of each row covered by its items; the rest is its COLD tail.
        version: grows with every newly built plan; equal versions mean equal plans, so uploads may be reused.
        variant: the variant of its engine to use, while graphs are captured; None leaves the choice to the engine.
    """

    decision: Decision
    items: tuple[Item, ...]
    coverage: npt.NDArray[np.int32]
    version: int
    variant: str | None = None

    @property
    def rows(self) -> int:
        return int(self.coverage.shape[0])

    @property
    def shared(self) -> bool:
        return self.decision.regime is not Regime.UNIFORM

    @property
    def tokens_not_reread(self) -> int:
        """Prefix tokens that UNIFORM would read again in one layer of this pass."""
        return sum(item.tokens_not_reread for item in self.items)


def uniform_plan(rows: int, why: Reason | Decision, version: int = 0) -> Plan:
    """A plan that leaves the pass to the stock backend."""
    decision = Decision(Regime.UNIFORM, why) if isinstance(why, Reason) else why
    return Plan(decision, (), np.zeros(rows, dtype=np.int32), version)
