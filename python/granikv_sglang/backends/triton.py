"""The Triton engine: fused grouped prefix, tails and merge on an NVIDIA GPU, safe to record in CUDA graphs."""

from __future__ import annotations

import torch

from granikv_kernels.grouped_decode import GroupedDecode, KernelConfig, small_config
from granikv_sglang.backends.base import DecodeBatch, Geometry, SharedDecode
from granikv_sglang.plan import Capacity, Plan

LEVELS = 4
"""Items a row may be in before the plan no longer fits: team, role, conversation and one more."""


SMALL = "small"
"""Variant for plans in which no item has more query rows than the small tile."""


class TritonSharedDecode(SharedDecode):
    """A :class:`GroupedDecode` for all layers; its work list lives in device memory, so plans change under one graph.

    A tile's height is fixed in a graph, so where the shipped tile is high there is a second op for small groups.

    Args:
        geometry: attention shapes of this rank.
        max_rows: the largest batch, padding included.
    """

    graph_safe = True

    def __init__(self, geometry: Geometry, max_rows: int) -> None:
        self.capacity: Capacity | None = Capacity(rows=max_rows, items=max_rows, pairs=LEVELS * max_rows)
        self._op = _op_of(geometry, max_rows)
        self._ops = {"": self._op}
        small = small_config(geometry.dtype, geometry.head_dim)
        self._small_members = 0
        if small is not None:
            self._ops[SMALL] = _op_of(geometry, max_rows, small, self._op)
            self._small_members = small.wide.block_m // self._op.gqa
        self.variants = tuple(self._ops)
        self._versions = dict.fromkeys(self._ops, -1)
        self._batch: DecodeBatch | None = None

    def variant_of(self, plan: Plan) -> str:
        if plan.variant is not None:
            return plan.variant
        return SMALL if all(len(item.rows) <= self._small_members for item in plan.items) else ""

    def prepare(self, plan: Plan, batch: DecodeBatch) -> None:
        self._batch = batch
        variant = self.variant_of(plan)
        self._op = self._ops[variant]
        if plan.version != self._versions[variant]:
            self._op.plan([(item.start, item.tokens, item.rows) for item in plan.items], plan.coverage)
            self._versions[variant] = plan.version

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


def _op_of(
    geometry: Geometry, max_rows: int, config: KernelConfig | None = None, partials_of: GroupedDecode | None = None
) -> GroupedDecode:
    heads = (geometry.q_heads, geometry.kv_heads, geometry.head_dim)
    sizes = (max_rows, max_rows, LEVELS * max_rows)
    return GroupedDecode(*sizes, *heads, geometry.dtype, geometry.device, config=config, partials_of=partials_of)
