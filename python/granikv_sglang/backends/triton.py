"""The Triton engine: fused grouped prefix, tails and merge on an NVIDIA GPU, safe to record in CUDA graphs."""

from __future__ import annotations

import torch

from granikv_kernels.grouped_decode import GroupedDecode
from granikv_sglang.backends.base import DecodeBatch, Geometry
from granikv_sglang.plan import Capacity, Plan

LEVELS = 4
"""Items a row may be in before the plan no longer fits: team, role, conversation and one more."""


class TritonSharedDecode:
    """One :class:`GroupedDecode` for all layers; its work list lives in device memory, so plans change under one graph.

    Args:
        geometry: attention shapes of this rank.
        max_rows: the largest batch, padding included.
    """

    graph_safe = True

    def __init__(self, geometry: Geometry, max_rows: int) -> None:
        self.capacity: Capacity | None = Capacity(rows=max_rows, items=max_rows, pairs=LEVELS * max_rows)
        self._op = GroupedDecode(
            max_rows,
            max_rows,
            LEVELS * max_rows,
            geometry.q_heads,
            geometry.kv_heads,
            geometry.head_dim,
            geometry.dtype,
            geometry.device,
        )
        self._version = -1
        self._batch: DecodeBatch | None = None

    def prepare(self, plan: Plan, batch: DecodeBatch) -> None:
        self._batch = batch
        if plan.version != self._version:
            self._op.plan([(item.start, item.tokens, item.rows) for item in plan.items], plan.coverage)
            self._version = plan.version

    def begin(self) -> None:
        assert self._batch is not None
        self._op.schedule(self._batch.seq_lens, self._batch.req_pool_indices)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float) -> torch.Tensor:
        assert self._batch is not None
        batch = self._batch
        return self._op.run(
            q,
            k_cache,
            v_cache,
            batch.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            sm_scale,
            torch.empty_like(q),
            reschedule=False,
        )
