"""Prefill over HOT prefixes with FlashInfer: each HOT stretch is one dense multi-query pass, tensor cores at full tilt.

Stock SGLang reads a cached prefix slot by slot (pages of one token, FlashAttention-2 code) for every request. A HOT
stretch is contiguous, so FlashInfer's ragged kernel (FlashAttention-3 on Hopper) takes it as it lies. Three parts,
merged by log-sum-exp (Ye et al. 2025): the new tokens among themselves, the HOT stretches, and what is cached but COLD.
Where every request brings few tokens, the first and the last are one: a merge and a launch less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from flashinfer import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    merge_state,
    merge_state_in_place,
)

from granikv_sglang.backends.base import ExtendBatch, Geometry
from granikv_sglang.plan import Plan, cold_part, levels_of, token_offsets

WORKSPACE_BYTES = 128 << 20
"""FlashInfer's recommended scratch space; all wrappers here run one after the other and share one."""

TILES = {64: 128, 128: 192, 256: 64}
"""Slots, by head size, of a tile in which FlashInfer's ragged kernel loads K and V on Hopper (``getCTATileSize``, not
causal). A dense read is a multiple of it: a tile across the end of a stretch would bring in slots of others, and their
weight 0 times NaN is NaN. The rest of a stretch counts as COLD."""

FEW = 256
"""New tokens of a request up to which they go with what is COLD, through FlashAttention-2: the new ones alone would
not fill FlashAttention-3's tiles either."""


@dataclass(frozen=True)
class _Hot:
    """One level, planned: ``where`` is the run of tokens it is about, or their indices on the device."""

    wrapper: BatchPrefillWithRaggedKVCacheWrapper
    where: slice | torch.Tensor


class FlashInferExtend:
    """See :class:`granikv_sglang.backends.base.PrefixExtend`.

    Args:
        geometry: attention shapes of this rank.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._tile = TILES.get(geometry.head_dim, 384)  # 384 is a multiple of all
        self._scratch = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=geometry.device)
        self._own = self._ragged()
        self._spare: list[BatchPrefillWithRaggedKVCacheWrapper] = []
        # FlashAttention-2 as stock uses it: few tokens are cached and COLD where most are HOT.
        self._cold = BatchPrefillWithPagedKVCacheWrapper(self._scratch, "NHD", backend="fa2")
        self._hot: list[_Hot] = []
        self._has_cold, self._together = False, False
        self._tokens = 0
        self._copied = torch.cuda.Event()

    def _ragged(self) -> BatchPrefillWithRaggedKVCacheWrapper:
        return BatchPrefillWithRaggedKVCacheWrapper(self._scratch, "NHD")

    def prepare(self, plan: Plan, batch: ExtendBatch) -> None:
        # FlashInfer plans into pinned buffers of its own and copies them asynchronously: the copies of the pass before
        # must have left before they are written again. They are the first work of that pass, so this hardly waits.
        self._copied.synchronize()
        offsets = token_offsets(batch.extend_lens)
        self._tokens = int(offsets[-1])
        indptr = _pinned(offsets)
        self._plan_cold(plan, batch, indptr)
        if not self._together:
            self._plan_ragged(self._own, indptr, indptr, causal=True)
        self._hot = []
        levels = levels_of(plan.items, offsets, self._tile)
        while len(self._spare) < len(levels):
            self._spare.append(self._ragged())
        for wrapper, level in zip(self._spare, levels, strict=False):
            self._plan_ragged(wrapper, _pinned(level.qo_indptr), _pinned(level.kv_indptr), causal=False)
            where = level.run_of(self._tokens)
            self._hot.append(_Hot(wrapper, self._upload(level.tokens) if where is None else where))
        self._copied.record()

    def _plan_ragged(
        self, wrapper: BatchPrefillWithRaggedKVCacheWrapper, qo: torch.Tensor, kv: torch.Tensor, causal: bool
    ) -> None:
        g = self._geometry
        wrapper.plan(
            qo, kv, g.q_heads, g.kv_heads, g.head_dim, causal=causal, q_data_type=g.dtype, kv_data_type=g.dtype
        )

    def _plan_cold(self, plan: Plan, batch: ExtendBatch, indptr: torch.Tensor) -> None:
        few = max(batch.extend_lens) <= FEW
        # New tokens are positions that no item covers, and a row's last ones.
        ends = [a + b for a, b in zip(batch.prefix_lens, batch.extend_lens, strict=True)] if few else batch.prefix_lens
        cold = cold_part(plan.items, ends, self._tile)
        self._has_cold = cold.rows.size > (self._tokens if few else 0)
        self._together = self._has_cold and few
        if not self._has_cold:
            return
        g = self._geometry
        rows = batch.req_pool_indices[self._upload(cold.rows)]
        slots = batch.req_to_token[rows, self._upload(cold.positions)]
        ones = torch.ones(len(batch.extend_lens), dtype=torch.int32, pin_memory=True)
        self._cold.plan(
            indptr, _pinned(cold.kv_indptr), slots, ones, g.q_heads, g.kv_heads, g.head_dim, 1,
            causal=self._together, q_data_type=g.dtype, kv_data_type=g.dtype,
        )  # fmt: skip

    def _upload(self, values: npt.NDArray[np.int32]) -> torch.Tensor:
        return _pinned(values).to(self._geometry.device, non_blocking=True)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        sm_scale: float,
    ) -> torch.Tensor:
        # A slice of the model's QKV as it is: the kernels take strides, a copy takes longer than the new tokens do.
        new, kv = q[: self._tokens], (k_cache.unsqueeze(1), v_cache.unsqueeze(1))
        if self._together:
            out, lse = self._cold.forward_return_lse(new, kv, True, sm_scale=sm_scale)
        else:
            out, lse = self._own.forward_return_lse(new, k[: self._tokens], v[: self._tokens], True, sm_scale=sm_scale)
            if self._has_cold:
                merge_state_in_place(out, lse, *self._cold.forward_return_lse(new, kv, sm_scale=sm_scale))
        for hot in self._hot:
            part, part_lse = hot.wrapper.forward_return_lse(q[hot.where], k_cache, v_cache, sm_scale=sm_scale)
            if isinstance(hot.where, slice):
                merge_state_in_place(out[hot.where], lse[hot.where], part, part_lse)
            else:
                merged, merged_lse = merge_state(out[hot.where], lse[hot.where], part, part_lse)
                out[hot.where], lse[hot.where] = merged, merged_lse
        if q.shape[0] == self._tokens:
            return out
        padded = torch.zeros_like(q)  # a pass padded for a graph: nobody reads the rows past the end
        padded[: self._tokens] = out
        return padded


def _pinned(values: npt.NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(values).pin_memory()
