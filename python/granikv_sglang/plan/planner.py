"""The per-step cache around the plan: a decode step changes no prefix, so most steps reuse the last plan as it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from granikv_sglang.core import Counters, Reason, Regime
from granikv_sglang.plan.base import Capacity, Decision, Item, Path, Plan, uniform_plan
from granikv_sglang.plan.classify import Features, StaticClassifier
from granikv_sglang.plan.extend import query_tiles
from granikv_sglang.plan.forest import build_items, coverage_of


class Planner:
    """Builds the plan of each decode pass on the host; holds the last one.

    Args:
        classifier: chooses the regime.
        token_bytes: K and V bytes of one token in one layer on this rank.
        gqa, kv_heads: query heads per KV head, and KV heads, of this rank.
        layers: layers of this rank, for the bytes counter.
        capacity: the largest plan the engine takes; None for no bound.
        whole_batch: share only what every request of the batch has in common, as batch-global cascades do.
        usable: whether the engine of a regime, or of ``"prefill"``, still works; a chosen one that does not is UNIFORM.
        note: told every decision with all that must be equal on all ranks, before ``usable`` is asked.
    """

    def __init__(
        self,
        classifier: StaticClassifier,
        *,
        token_bytes: int,
        gqa: int,
        kv_heads: int,
        layers: int,
        counters: Counters,
        capacity: Capacity | None = None,
        whole_batch: bool = False,
        usable: Callable[[str], bool] = lambda _: True,
        note: Callable[..., None] | None = None,
    ) -> None:
        self._classifier = classifier
        self._token_bytes = token_bytes
        self._gqa = gqa
        self._kv_heads = kv_heads
        self._layers = layers
        self._counters = counters
        self._capacity = capacity
        self._whole_batch = whole_batch
        self._usable = usable
        self._note = note
        self._key: Hashable = None
        self._plan: Plan | None = None
        self._version = 0

    def decode(self, key: Hashable, paths: Callable[[], Sequence[Path]]) -> Plan:
        """The plan of a decode pass.

        ``key`` stands for the batch's membership and the tree's epoch; ``paths`` is called only when it has changed.
        """
        if self._plan is None or key != self._key:
            self._plan = self._build(paths())
            self._key = key
            self._counters.plans_built += 1
        else:
            self._counters.plans_reused += 1
        self._count(self._plan)
        return self._plan

    def forget(self) -> None:
        """Build the next plan anew, under a new version: an engine has failed with the last one half prepared."""
        self._key = None

    def prefill(self, paths: Sequence[Path], extend_lens: Sequence[int]) -> Plan:
        """The plan of a prefill: HOT stretches of the cached prefixes, one member being enough.

        Args:
            paths: HOT path of each row's cached prefix.
            extend_lens: new tokens of each row.
        """
        self._version += 1
        items = build_items(paths, self._classifier.thresholds.min_item_tokens, min_members=1)
        tiles = query_tiles(items, extend_lens, self._gqa * self._kv_heads)
        decision = self._settle(self._classifier.classify_prefill(items, tiles), items, "prefill")
        if decision.regime is Regime.UNIFORM:
            plan = uniform_plan(len(paths), decision.reason, self._version)
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

    def _build(self, paths: Sequence[Path]) -> Plan:
        self._version += 1
        members = max(2, len(paths)) if self._whole_batch else 2
        items = build_items(paths, self._classifier.thresholds.min_item_tokens, members)
        if self._capacity is None or self._capacity.holds(len(paths), items):
            decision = self._classifier.classify(Features(items, len(paths), self._token_bytes, self._gqa))
        else:
            decision = Decision(Regime.UNIFORM, Reason.OVER_CAPACITY)
        decision = self._settle(decision, items, decision.regime.value)
        if decision.regime is Regime.UNIFORM:
            return uniform_plan(len(paths), decision.reason, self._version)
        return Plan(decision, items, coverage_of(items, len(paths)), self._version)

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
        self._counters.bytes_not_reread += plan.tokens_not_reread * self._token_bytes * self._layers
