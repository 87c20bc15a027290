"""The per-step cache around the plan: a decode step changes no prefix, so most steps reuse the last plan as it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from granikv_sglang.core import Counters, Reason, Regime
from granikv_sglang.plan.base import Capacity, Decision, Item, Path, Plan, uniform_plan
from granikv_sglang.plan.classify import HOLD_PASSES, Classifier, Standing
from granikv_sglang.plan.cost import predict
from granikv_sglang.plan.extend import query_tiles
from granikv_sglang.plan.features import Features, Shape
from granikv_sglang.plan.forest import build_items, coverage_of, within

RECLASSIFY_PASSES = 64
"""Passes with one membership after which the regime is weighed again.

Between two changes of membership only the private tails grow, a token a request and pass, and every regime reads them:
in 64 passes what differs between the regimes moves by less than the hysteresis. So a cached pass pays for a 64th of a
classification.
"""


class Planner:
    """Builds the plan of each decode pass on the host; holds the last one.

    Args:
        classifier: chooses the regime.
        shape: attention of this rank.
        capacities: the largest plan that a regime's engine takes; a regime that is not in it has no bound.
        whole_batch: share only what every request of the batch has in common, as batch-global cascades do.
        usable: whether the engine of a regime, or of ``"prefill"``, still works; a chosen one that does not is UNIFORM.
        note: told every decision with all that must be equal on all ranks, before ``usable`` is asked.
    """

    def __init__(
        self,
        classifier: Classifier,
        *,
        shape: Shape,
        counters: Counters,
        capacities: Mapping[Regime, Capacity] | None = None,
        whole_batch: bool = False,
        usable: Callable[[str], bool] = lambda _: True,
        note: Callable[..., None] | None = None,
    ) -> None:
        self._classifier = classifier
        self._shape = shape
        self._counters = counters
        self._capacities = capacities or {}
        self._whole_batch = whole_batch
        self._usable = usable
        self._note = note
        self._key: Hashable = None
        self._plan: Plan | None = None
        self._version = 0
        self._items: tuple[Item, ...] = ()
        self._coverage: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._features: Features | None = None
        self._holding: tuple[Regime, ...] = ()
        self._standing: Standing | None = None
        self._age = 0

    def decode(self, key: Hashable, paths: Callable[[], Sequence[Path]], tokens: Callable[[], int]) -> Plan:
        """The plan of a decode pass.

        Args:
            key: stands for the batch's membership and the tree's epoch.
            paths: called only when ``key`` has changed.
            tokens: all tokens of the batch's contexts; called only when the regime is weighed.
        """
        if self._plan is None or key != self._key:
            self._plan = self._build(paths(), tokens)
            self._key = key
            self._counters.plans_built += 1
            self._age = 0
        else:
            self._counters.plans_reused += 1
            self._age += 1
            if self._due() and self._weighed(self._plan.decision):
                self._plan = self._again(self._plan, tokens())
        if self._standing is not None and self._weighed(self._plan.decision):
            self._standing = Standing(self._standing.regime, self._standing.passes + 1)
        self._count(self._plan)
        self._counters.bounds[(self._plan.decision.regime, self._plan.decision.bound)] += 1
        return self._plan

    def forget(self) -> None:
        """Build the next plan anew, under a new version: an engine has failed with the last one half prepared."""
        self._key = None

    def predicted_us(self, tokens: int) -> float:
        """Microseconds of one attention layer of the last decode plan in its regime, with the tails of now."""
        assert self._plan is not None
        regime = self._plan.decision.regime
        regimes = () if regime is Regime.UNIFORM else (regime,)
        return predict(self._grown(tokens), self._classifier.constants, regimes)[-1].us

    def prefill(self, paths: Sequence[Path], extend_lens: Sequence[int]) -> Plan:
        """The plan of a prefill: HOT stretches of the cached prefixes, one member being enough.

        Args:
            paths: HOT path of each row's cached prefix.
            extend_lens: new tokens of each row.
        """
        self._version += 1
        items = build_items(paths, self._classifier.bounds.min_item_tokens, min_members=1)
        tiles = query_tiles(items, extend_lens, self._shape.q_heads)
        decision = self._settle(self._classifier.classify_prefill(items, tiles), items, "prefill")
        if decision.regime is Regime.UNIFORM:
            plan = uniform_plan(len(paths), decision, self._version)
        else:
            plan = Plan(decision, items, coverage_of(items, len(paths)), self._version)
        self._counters.steps[(decision.regime, decision.reason)] += 1
        self._counters.hot_prefill_tokens += int(plan.coverage.sum())
        return plan

    def other(self, rows: int) -> Plan:
        """The plan of a pass that is neither a plain decode nor a plain prefill: always UNIFORM."""
        plan = uniform_plan(rows, Reason.NOT_DECODE)
        self._count(plan)
        return plan

    def _build(self, paths: Sequence[Path], tokens: Callable[[], int]) -> Plan:
        members = max(2, len(paths)) if self._whole_batch else 2
        items, rows = build_items(paths, self._classifier.bounds.min_item_tokens, members), len(paths)
        holding = self._that_hold(items, rows)
        if not holding and self._that_hold((), rows):
            # So many rows are no trouble, so many items are: what fits is shared.
            items = within(items, lambda some: bool(self._that_hold(some, rows))) or items
            holding = self._that_hold(items, rows)
        self._items, self._holding = items, holding
        self._coverage = coverage_of(items, rows)
        self._features = None
        decision = self._classify(tokens() if items else rows)
        return self._plan_of(self._settle(decision, items, decision.regime.value))

    def _that_hold(self, items: Sequence[Item], rows: int) -> tuple[Regime, ...]:
        """The regimes in question whose engines' buffers take a plan of ``items`` for ``rows`` requests."""
        capacities = ((regime, self._capacities.get(regime)) for regime in self._classifier.regimes())
        return tuple(regime for regime, capacity in capacities if capacity is None or capacity.holds(rows, items))

    def _grown(self, tokens: int) -> Features:
        """Features of the batch with ``tokens`` tokens in its contexts; most of them change with membership alone."""
        if self._features is None:
            longest = int(self._coverage.max()) if self._coverage.size else 0
            self._features = Features.of(self._items, longest, self._coverage.shape[0], self._shape, tokens)
        else:
            self._features = self._features.grown(tokens)
        return self._features

    def _classify(self, tokens: int) -> Decision:
        decision = self._classifier.classify(self._grown(tokens), self._standing, self._holding)
        if self._weighed(decision) and (self._standing is None or decision.regime is not self._standing.regime):
            self._counters.regime_switches += self._standing is not None
            self._standing = Standing(decision.regime, 0)
        return decision

    def _due(self) -> bool:
        """Whether to weigh the regimes again; what was only held is looked at as soon as the hold ends."""
        held = self._plan is not None and self._plan.decision.reason is Reason.NEAR_TIE
        return self._age % (HOLD_PASSES if held else RECLASSIFY_PASSES) == 0

    def _again(self, plan: Plan, tokens: int) -> Plan:
        """The same plan while the regime stays, so that engines keep what they have uploaded."""
        self._counters.reclassified += 1
        decision = self._classify(tokens)
        decision = self._settle(decision, self._items, decision.regime.value)
        if decision.regime is plan.decision.regime:
            return Plan(decision, plan.items, plan.coverage, plan.version)
        return self._plan_of(decision)

    def _plan_of(self, decision: Decision) -> Plan:
        self._version += 1
        if decision.regime is Regime.UNIFORM:
            return uniform_plan(self._coverage.shape[0], decision, self._version)
        return Plan(decision, self._items, self._coverage, self._version)

    @staticmethod
    def _weighed(decision: Decision) -> bool:
        """Whether regimes were weighed against each other for it."""
        return bool(decision.predicted_us) and decision.reason is not Reason.FORCED

    def _settle(self, decision: Decision, items: Sequence[Item], engine: str) -> Decision:
        """``decision`` as it can be carried out on this rank."""
        if self._note is not None:
            flat = [n for item in items for n in (item.start, item.tokens, len(item.rows), *item.rows)]
            self._note(f"{engine} {decision.regime.value} {decision.reason.value}", *flat)
        if decision.regime is Regime.UNIFORM or self._usable(engine):
            return decision
        return Decision(Regime.UNIFORM, Reason.ENGINE_OFF)

    def _count(self, plan: Plan) -> None:
        self._counters.steps[(plan.decision.regime, plan.decision.reason)] += 1
        self._counters.shared_rows += int(np.count_nonzero(plan.coverage)) if plan.shared else 0
        self._counters.bytes_not_reread += plan.tokens_not_reread * self._shape.token_bytes * self._shape.layers
