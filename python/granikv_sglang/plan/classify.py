"""The regime classifier: predicted times of one layer, a margin, and hysteresis. A pure function of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from granikv_sglang.core import Bound, Reason, Regime
from granikv_sglang.plan.base import Decision, Item
from granikv_sglang.plan.cost import Constants, Cost, all_reduce_us, analytic, predict
from granikv_sglang.plan.features import Features
from granikv_sglang.plan.work import Kind, Machine

HOLD_PASSES = 16
"""Passes that a regime stays after a switch unless the gain of another is large."""
LARGE_GAIN = 0.25
"""A gain that ends the hold."""
SWITCH_GAIN = 0.03
"""What another shared regime must gain over the shared regime in force."""


@dataclass(frozen=True)
class Limits:
    """What is not worth a prediction, on one kind of device.

    ``min_item_tokens`` is the shortest stretch worth an item. ``min_prefill_tiles`` is query tiles (see
    :func:`query_tiles`) from which a prefill reads HOT stretches as dense ones: the dense kernel does not split a
    stretch, so it needs a tile for each SM.
    """

    min_item_tokens: int
    min_prefill_tiles: int


LIMITS = {Kind.CUDA: Limits(min_item_tokens=128, min_prefill_tiles=128), Kind.CPU: Limits(16, 1)}


@dataclass(frozen=True, slots=True)
class Standing:
    """The regime that the last decode pass with something shared had, and passes since it was switched to."""

    regime: Regime
    passes: int


@dataclass(frozen=True)
class Classifier:
    """Chooses the regime of forward passes.

    Args:
        constants: of this device.
        forced: the regime to take wherever anything is shared.
        limits: default: those of the device's kind.
    """

    constants: Constants
    forced: Regime | None = None
    limits: Limits | None = None

    @staticmethod
    def of(machine: Machine, forced: Regime | None = None) -> Classifier:
        """One with analytic constants."""
        return Classifier(analytic(machine), forced)

    @property
    def bounds(self) -> Limits:
        """The limits in force."""
        return LIMITS[self.constants.machine.kind] if self.limits is None else self.limits

    def regimes(self) -> tuple[Regime, ...]:
        """The shared regimes that a decode pass may get; others need no engine and no graph."""
        if self.forced is not None:
            return () if self.forced is Regime.UNIFORM else (self.forced,)
        return self.constants.regimes

    def classify(
        self, features: Features, standing: Standing | None = None, regimes: tuple[Regime, ...] | None = None
    ) -> Decision:
        """The decision of a decode pass.

        Args:
            features: of the pass.
            standing: what the passes before it had.
            regimes: shared regimes whose engines hold the plan; default: all of :meth:`regimes`.
        """
        if not features.tokens:
            return Decision(_UNIFORM, Reason.NOTHING_SHARED)
        shared = self.regimes() if regimes is None else regimes
        if not shared and self.forced is not _UNIFORM:
            return Decision(_UNIFORM, Reason.OVER_CAPACITY)
        names = (_UNIFORM, *shared)
        costs = predict(features, self.constants, shared)
        predicted = tuple(zip(names, [cost.us for cost in costs], strict=True))
        if self.forced is not None:
            return Decision(self.forced, Reason.FORCED, costs[-1].bound, predicted)
        reduce_us = all_reduce_us(features.shape, features.rows, self.constants.link)
        margin = self.constants.margin_of(features.shape)
        chosen, held = self._choose(names, costs, reduce_us, margin, standing)
        regime, cost = names[chosen], costs[chosen]
        bound = _COMMUNICATION if reduce_us > cost.us else cost.bound
        return Decision(regime, _NEAR_TIE if held else _reason(regime, bound), bound, predicted)

    def _choose(
        self,
        names: tuple[Regime, ...],
        costs: list[Cost],
        reduce_us: float,
        margin: float,
        standing: Standing | None,
    ) -> tuple[int, bool]:
        """Index of the regime, and whether it only stays because no other is better by enough.

        The all-reduce behind attention counts as part of the layer, so that a gain means the same share of a step
        everywhere: where communication is the cost, attention alone must gain more to be worth its launches.
        """
        best = 0
        for i in range(1, len(costs)):
            if best == 0 or _ahead(costs[i], costs[best], names[i]):
                best = i
        uniform = costs[0].us + reduce_us
        fresh = best if costs[best].us + reduce_us < uniform * (1 - margin) else 0
        if standing is None or standing.regime is names[fresh] or standing.regime not in names:
            return fresh, False
        stays = names.index(standing.regime)
        stays_us, fresh_us = costs[stays].us + reduce_us, costs[fresh].us + reduce_us
        # Left at half the margin it is entered at; never kept where UNIFORM is predicted to be faster.
        pays = stays == 0 or stays_us < uniform * (1 - margin / 2)
        if fresh == 0:
            keep = pays
        elif standing.passes < HOLD_PASSES:
            keep = pays and fresh_us >= stays_us * (1 - LARGE_GAIN)
        else:
            keep = pays and stays != 0 and fresh_us >= stays_us * (1 - SWITCH_GAIN)
        return (stays, True) if keep else (fresh, False)

    def classify_prefill(self, items: Sequence[Item], tiles: int) -> Decision:
        """The same for a prefill: its queries are many, so a HOT stretch is always one multi-query pass."""
        if not items:
            return Decision(Regime.UNIFORM, Reason.NOT_DECODE)
        if self.forced is Regime.UNIFORM:
            return Decision(Regime.UNIFORM, Reason.FORCED)
        if tiles < self.bounds.min_prefill_tiles:
            return Decision(Regime.UNIFORM, Reason.TOO_SMALL)
        return Decision(Regime.CASCADE, Reason.HOT_PREFILL)


# Looking up an enum's member costs as much as a few products.
_UNIFORM, _TOO_SMALL, _NEAR_TIE = Regime.UNIFORM, Reason.TOO_SMALL, Reason.NEAR_TIE
_COMMUNICATION = Bound.COMMUNICATION
_REASONS = {
    Bound.COMPUTE: Reason.COMPUTE_BOUND,
    Bound.MEMORY: Reason.MEMORY_BOUND,
    Bound.LAUNCH: Reason.LAUNCH_BOUND,
    Bound.COMMUNICATION: Reason.COMMUNICATION_BOUND,
}


def _ahead(cost: Cost, other: Cost, regime: Regime) -> bool:
    """Whether ``regime`` beats another shared one. Where one engine does both, what bounds the pass names it."""
    if cost.us != other.us:
        return cost.us < other.us
    return (cost.bound is Bound.COMPUTE) is (regime is Regime.BATCHED_GEMM)


def _reason(regime: Regime, bound: Bound) -> Reason:
    return _TOO_SMALL if regime is _UNIFORM else _REASONS[bound]
