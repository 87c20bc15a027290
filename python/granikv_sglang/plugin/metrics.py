"""Prometheus counters of one scheduler process, published under ``--enable-metrics``.

SGLang runs prometheus_client in multi-process mode: what a scheduler counts here appears at the server's /metrics.
"""

from __future__ import annotations

from collections.abc import Hashable

from prometheus_client import Counter, Gauge

from granikv_sglang.core import Counters
from granikv_sglang.tree.radix import GraniRadixCache

_PLAIN = {
    "promotions": "Shared prefixes copied into the HOT arena.",
    "promoted_tokens": "Tokens copied into the HOT arena.",
    "hot_evictions": "HOT nodes evicted.",
    "hot_evicted_tokens": "Tokens of HOT nodes evicted.",
    "room_evictions": "Unlocked nodes evicted to make a contiguous run.",
    "hot_prefill_tokens": "Cached tokens that prefills read as dense HOT stretches.",
}


class Metrics:
    """Mirrors :class:`Counters` into Prometheus by adding what has changed since the last call.

    Args:
        model_name, tp_rank: label values, as in SGLang's own metrics.
    """

    def __init__(self, model_name: str, tp_rank: int) -> None:
        self._labels = {"model_name": model_name, "tp_rank": str(tp_rank)}
        names = list(self._labels)
        self._plain = {k: Counter(f"granikv_{k}_total", text, names) for k, text in _PLAIN.items()}
        self._bytes = Counter(
            "granikv_prefix_bytes_not_reread_total", "K and V bytes of shared prefix that were not read again.", names
        )
        self._steps = Counter(
            "granikv_forward_passes_total", "Forward passes by regime and reason.", [*names, "regime", "reason"]
        )
        self._declines = Counter(
            "granikv_promotion_declines_total", "Shared prefixes not promoted, by reason.", [*names, "reason"]
        )
        self._hot_tokens = Gauge(
            "granikv_hot_tokens", "Tokens in the HOT arena.", names, multiprocess_mode="mostrecent"
        )
        self._hot_nodes = Gauge("granikv_hot_nodes", "HOT radix nodes.", names, multiprocess_mode="mostrecent")
        self._last: dict[Hashable, int] = {}

    def publish(self, counters: Counters, tree: GraniRadixCache) -> None:
        """Bring Prometheus up to date; cheap when nothing has changed."""
        for name, metric in self._plain.items():
            self._add(metric.labels(**self._labels), name, getattr(counters, name))
        self._add(self._bytes.labels(**self._labels), "bytes", counters.bytes_not_reread)
        for (regime, reason), count in counters.steps.items():
            labels = {**self._labels, "regime": regime.value, "reason": reason.value}
            self._add(self._steps.labels(**labels), (regime, reason), count)
        for decline, count in counters.declines.items():
            self._add(self._declines.labels(**self._labels, reason=decline.value), decline, count)
        self._hot_tokens.labels(**self._labels).set(tree.hot_tokens())
        self._hot_nodes.labels(**self._labels).set(len(tree.hot))

    def _add(self, metric: Counter, key: Hashable, total: int) -> None:
        added = total - self._last.get(key, 0)
        if added:
            metric.inc(added)
            self._last[key] = total
