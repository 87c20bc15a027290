"""Prometheus metrics of one scheduler process, published under ``--enable-metrics``.

SGLang runs prometheus_client in multi-process mode: what a scheduler counts here appears at the server's /metrics.
Names follow Prometheus' conventions: counters where a rate is wanted, ending in ``_total``, the unit before that.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from prometheus_client import Counter, Gauge

from granikv_sglang.core import Counters
from granikv_sglang.tree.radix import GraniRadixCache


@dataclass(frozen=True)
class Metric:
    """One metric: its name, what it counts, and the labels it has besides ``model_name`` and ``tp_rank``.

    ``counter`` names the field of :class:`Counters` it follows; empty for the labelled ones and for gauges.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()
    counter: str = ""

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


_PASSES = Metric("granikv_forward_passes_total", "Forward passes by regime and reason.", ("regime", "reason"))
_BOUNDS = Metric(
    "granikv_decode_bounds_total",
    "Decode passes by regime and by what attention is predicted to wait for most.",
    ("regime", "bound"),
)
_SAMPLED = Metric("granikv_timed_layers_total", "Attention layers timed while serving, one a sample.", ("regime",))
_PREDICTED = Metric("granikv_timed_layers_predicted_seconds_total", "Predicted time of the timed layers.", ("regime",))
_MEASURED = Metric("granikv_timed_layers_measured_seconds_total", "Measured time of the timed layers.", ("regime",))
_DECLINES = Metric("granikv_promotion_declines_total", "Shared prefixes not promoted, by reason.", ("reason",))
_SLOTS = Metric("granikv_slots", "KV slots by state: hot, cold (in use or cached) and free.", ("state",))
_NODES = Metric("granikv_hot_nodes", "HOT radix nodes.")

METRICS: tuple[Metric, ...] = (
    Metric(
        "granikv_prefix_not_reread_bytes_total",
        "K and V bytes of shared prefix that decode did not read again.",
        counter="bytes_not_reread",
    ),
    _PASSES,
    _BOUNDS,
    _SAMPLED,
    _PREDICTED,
    _MEASURED,
    Metric("granikv_shared_rows_total", "Requests of shared passes, one count a pass.", counter="shared_rows"),
    Metric("granikv_promotions_total", "Shared prefixes copied into the HOT arena.", counter="promotions"),
    Metric("granikv_promoted_tokens_total", "Tokens copied into the HOT arena.", counter="promoted_tokens"),
    Metric(
        "granikv_extended_promotions_total", "Promotions that continue a HOT prefix.", counter="extended_promotions"
    ),
    Metric(
        "granikv_partial_promotions_total",
        "Promotions of a prefix's beginning, no free run being long enough for all of it.",
        counter="partial_promotions",
    ),
    _DECLINES,
    Metric(
        "granikv_hot_prefill_tokens_total",
        "Cached tokens that prefills read as dense HOT stretches.",
        counter="hot_prefill_tokens",
    ),
    Metric("granikv_hot_splits_total", "HOT nodes split in two, without a copy.", counter="hot_splits"),
    Metric("granikv_hot_evictions_total", "HOT nodes evicted.", counter="hot_evictions"),
    Metric("granikv_hot_evicted_tokens_total", "Tokens of HOT nodes evicted.", counter="hot_evicted_tokens"),
    Metric(
        "granikv_room_evictions_total", "Unlocked nodes evicted to make a contiguous run.", counter="room_evictions"
    ),
    Metric("granikv_plans_built_total", "Decode plans made because membership changed.", counter="plans_built"),
    Metric("granikv_plans_reused_total", "Decode passes that took the last plan as it was.", counter="plans_reused"),
    Metric(
        "granikv_engine_faults_total",
        "Shared passes whose kernel raised; the stock backend served them.",
        counter="engine_faults",
    ),
    Metric(
        "granikv_plans_reclassified_total",
        "Decode plans whose regime was weighed again, membership unchanged.",
        counter="reclassified",
    ),
    Metric(
        "granikv_rank_comparisons_total",
        "Comparisons of all decisions and answers between tensor-parallel ranks; a difference ends the server.",
        counter="rank_comparisons",
    ),
    Metric("granikv_regime_switches_total", "Changes of regime between shared passes.", counter="regime_switches"),
    Metric("granikv_audits_total", "Proofs of slot conservation (--granikv-audit).", counter="audits"),
    _SLOTS,
    _NODES,
)
"""Every metric, in the order of the documentation."""


class Metrics:
    """Mirrors :class:`Counters` into Prometheus by adding what has changed since the last call.

    Args:
        model_name, tp_rank: label values, as in SGLang's own metrics.
    """

    def __init__(self, model_name: str, tp_rank: int) -> None:
        self._labels = {"model_name": model_name, "tp_rank": str(tp_rank)}
        names = list(self._labels)
        self._counters = {m: Counter(m.name, m.text, [*names, *m.labels]) for m in METRICS if m.is_counter}
        self._gauges = {
            m: Gauge(m.name, m.text, [*names, *m.labels], multiprocess_mode="mostrecent")
            for m in METRICS
            if not m.is_counter
        }
        self._last: dict[Hashable, int] = {}

    def publish(self, counters: Counters, tree: GraniRadixCache) -> None:
        """Bring Prometheus up to date; cheap when nothing has changed."""
        for metric in self._counters:
            if metric.counter:
                self._add(metric, getattr(counters, metric.counter))
        for (regime, reason), count in counters.steps.items():
            self._add(_PASSES, count, regime=regime.value, reason=reason.value)
        for (regime, bound), count in counters.bounds.items():
            self._add(_BOUNDS, count, regime=regime.value, bound=bound.value)
        for regime, count in counters.sampled.items():
            self._add(_SAMPLED, count, regime=regime.value)
            self._add(_PREDICTED, counters.predicted_ns[regime], 1e-9, regime=regime.value)
            self._add(_MEASURED, counters.measured_ns[regime], 1e-9, regime=regime.value)
        for decline, count in counters.declines.items():
            self._add(_DECLINES, count, reason=decline.value)
        hot, free = tree.hot_tokens(), tree.allocator.available_size()
        for state, slots in {"hot": hot, "free": free, "cold": tree.allocator.size - hot - free}.items():
            self._gauges[_SLOTS].labels(**self._labels, state=state).set(slots)
        self._gauges[_NODES].labels(**self._labels).set(len(tree.hot))

    def _add(self, metric: Metric, total: int, unit: float = 1, **labels: str) -> None:
        key = (metric, *labels.values())
        added = total - self._last.get(key, 0)
        # A counter of zero is published as well: a rate needs its first point before the first event.
        if added or key not in self._last:
            self._counters[metric].labels(**self._labels, **labels).inc(added * unit)
            self._last[key] = total
