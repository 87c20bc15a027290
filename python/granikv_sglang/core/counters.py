"""What a scheduler process has done so far. Monotonic; read by /get_server_info, Prometheus and the doctor."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from granikv_sglang.core.types import Bound, Decline, Reason, Regime


@dataclass
class Counters:
    """Monotonic counters of one process.

    ``partial_promotions`` is promotions of a prefix's beginning, no free run being long enough for all of it. ``steps``
    counts forward passes by regime and reason; ``bytes_not_reread`` is K and V bytes of shared prefix, over all layers
    of this rank, that UNIFORM would have read again in those decode passes; ``hot_prefill_tokens`` is cached tokens
    that prefills read as dense HOT stretches; ``engine_faults`` counts passes that an engine failed in and the stock
    backend finished. ``bounds`` counts decode passes by regime and predicted bound. ``sampled`` is decode passes of
    which a layer was timed, by regime; ``predicted_ns`` and ``measured_ns`` are those layers' nanoseconds in all, as
    predicted and as measured. ``rank_comparisons`` counts exchanges between tensor-parallel ranks that found no
    difference.
    """

    promotions: int = 0
    promoted_tokens: int = 0
    extended_promotions: int = 0
    partial_promotions: int = 0
    hot_splits: int = 0
    hot_evictions: int = 0
    hot_evicted_tokens: int = 0
    room_evictions: int = 0
    audits: int = 0
    engine_faults: int = 0
    shared_rows: int = 0
    bytes_not_reread: int = 0
    hot_prefill_tokens: int = 0
    plans_built: int = 0
    plans_reused: int = 0
    reclassified: int = 0
    regime_switches: int = 0
    rank_comparisons: int = 0
    steps: Counter[tuple[Regime, Reason]] = field(default_factory=Counter)
    declines: Counter[Decline] = field(default_factory=Counter)
    bounds: Counter[tuple[Regime, Bound]] = field(default_factory=Counter)
    sampled: Counter[Regime] = field(default_factory=Counter)
    predicted_ns: Counter[Regime] = field(default_factory=Counter)
    measured_ns: Counter[Regime] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values: enums become their labels, steps are nested regime -> reason -> count."""
        steps: dict[str, dict[str, int]] = {regime.value: {} for regime in Regime}
        for (regime, reason), count in self.steps.items():
            steps[regime.value][reason.value] = count
        bounds: dict[str, dict[str, int]] = {regime.value: {} for regime in Regime}
        for (regime, bound), count in self.bounds.items():
            bounds[regime.value][bound.value] = count
        timed = {r.value: {"passes": n, **self._drift(r)} for r, n in self.sampled.items()}
        plain = {k: v for k, v in self.__dict__.items() if isinstance(v, int)}
        return {
            **plain,
            "steps": steps,
            "shared_steps": sum(n for (regime, _), n in self.steps.items() if regime is not Regime.UNIFORM),
            "bounds": bounds,
            "sampled": timed,
            "declines": {reason.value: self.declines.get(reason, 0) for reason in Decline},
        }

    def _drift(self, regime: Regime) -> dict[str, float]:
        """Mean microseconds of a timed layer, and how many times longer it took than predicted."""
        passes, predicted, measured = self.sampled[regime], self.predicted_ns[regime], self.measured_ns[regime]
        return {
            "predicted_us": round(predicted / passes / 1e3, 2),
            "measured_us": round(measured / passes / 1e3, 2),
            "ratio": round(measured / max(1, predicted), 3),
        }
