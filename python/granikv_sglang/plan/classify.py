"""The first regime classifier: static thresholds on plain features.

The bounds come from the measurements the design stands on (one H200) and, for the CPU engine, from `make bench-cpu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from granikv_sglang.core import Reason, Regime
from granikv_sglang.plan.base import Decision, Item


@dataclass(frozen=True)
class Thresholds:
    """Where a shared regime starts to pay, on one kind of device.

    ``min_saved_bytes`` is K and V bytes of one layer not read again; ``gemm_rows`` is query rows per item (members
    times the GQA ratio) from which the matrix units and no longer the reads are the cost; ``min_item_tokens`` is the
    shortest stretch worth an item. ``min_prefill_tiles`` is query tiles (see :func:`query_tiles`) from which a prefill
    reads HOT stretches as dense ones: the dense kernel does not split a stretch, so it needs a tile for each SM.
    ``memory_bound`` is the regime that was measured faster where reads are the cost.
    """

    min_saved_bytes: int
    gemm_rows: int
    min_item_tokens: int
    min_prefill_tiles: int
    memory_bound: Regime = Regime.CASCADE


# On an H200, 4 requests on 16K (201 MB not re-read a layer) break even with the best stock backend; the extra launches
# cost about 20 us, which is 90 MB of reads. FlashInfer's cascade took 51 us at 16 requests on 16K, our kernels 35.
CUDA_THRESHOLDS = Thresholds(
    min_saved_bytes=96 << 20,
    gemm_rows=64,
    min_item_tokens=128,
    min_prefill_tiles=128,
    memory_bound=Regime.BATCHED_GEMM,
)
# On a CPU there is no launch to pay: gathering a kilobyte already costs more than the merge of one row.
CPU_THRESHOLDS = Thresholds(min_saved_bytes=32 << 10, gemm_rows=24, min_item_tokens=16, min_prefill_tiles=1)


@dataclass(frozen=True)
class Features:
    """What the classifier knows about one forward pass.

    ``token_bytes`` is K and V bytes of one token in one layer on this rank; ``gqa`` is query heads per KV head.
    """

    items: Sequence[Item]
    rows: int
    token_bytes: int
    gqa: int


@dataclass(frozen=True)
class StaticClassifier:
    """``classify(features) -> Decision``. ``forced`` names a regime to take wherever anything is shared."""

    thresholds: Thresholds
    forced: Regime | None = None

    def regimes(self) -> tuple[Regime, ...]:
        """The shared regimes that a decode pass may get; others need no engine and no graph."""
        if self.forced is not None:
            return () if self.forced is Regime.UNIFORM else (self.forced,)
        return tuple(dict.fromkeys((Regime.BATCHED_GEMM, self.thresholds.memory_bound)))

    def classify(self, features: Features) -> Decision:
        if not features.items:
            return Decision(Regime.UNIFORM, Reason.NOTHING_SHARED)
        if self.forced is not None:
            return Decision(self.forced, Reason.FORCED)
        saved = sum(item.tokens_not_reread for item in features.items) * features.token_bytes
        if saved < self.thresholds.min_saved_bytes:
            return Decision(Regime.UNIFORM, Reason.TOO_SMALL)
        query_rows = max(len(item.rows) for item in features.items) * features.gqa
        if query_rows >= self.thresholds.gemm_rows:
            return Decision(Regime.BATCHED_GEMM, Reason.COMPUTE_BOUND)
        return Decision(self.thresholds.memory_bound, Reason.MEMORY_BOUND)

    def classify_prefill(self, items: Sequence[Item], tiles: int) -> Decision:
        """The same for a prefill: its queries are many, so a HOT stretch is always one multi-query pass."""
        if not items:
            return Decision(Regime.UNIFORM, Reason.NOT_DECODE)
        if self.forced is Regime.UNIFORM:
            return Decision(Regime.UNIFORM, Reason.FORCED)
        if tiles < self.thresholds.min_prefill_tiles:
            return Decision(Regime.UNIFORM, Reason.TOO_SMALL)
        return Decision(Regime.CASCADE, Reason.HOT_PREFILL)
