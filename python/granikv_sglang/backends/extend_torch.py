"""Prefill over HOT prefixes in plain torch: what a CPU runs, and what the FlashInfer engine is tested against."""

from __future__ import annotations

import torch

from granikv_kernels.cpu_attention import causal_attention_cpu, dense_attention_cpu
from granikv_kernels.merge_state import merge_states_reference
from granikv_sglang.backends.base import ExtendBatch
from granikv_sglang.plan import Plan, cold_part, levels_of, token_offsets


class TorchExtend:
    """See :class:`granikv_sglang.backends.base.PrefixExtend`. Each HOT stretch is read once for all its requests."""

    def prepare(self, plan: Plan, batch: ExtendBatch) -> None:
        offsets = token_offsets(batch.extend_lens)
        self._offsets = offsets.tolist()
        # (tokens of the pass, slice of the caches) of each HOT stretch, (row, slots) of each COLD one.
        self._hot: list[tuple[torch.Tensor, slice]] = []
        for level in levels_of(plan.items, offsets):
            for segment in range(len(level.qo_indptr) - 1):
                first, end = int(level.qo_indptr[segment]), int(level.qo_indptr[segment + 1])
                if first < end:
                    slots = slice(int(level.kv_indptr[segment]), int(level.kv_indptr[segment + 1]))
                    self._hot.append((torch.from_numpy(level.tokens[first:end]).to(torch.int64), slots))
        cold = cold_part(plan.items, batch.prefix_lens)
        rows = batch.req_pool_indices.to(torch.int64)[torch.from_numpy(cold.rows).to(torch.int64)]
        slots = batch.req_to_token[rows, torch.from_numpy(cold.positions).to(torch.int64)].to(torch.int64)
        self._cold = list(torch.tensor_split(slots, torch.from_numpy(cold.kv_indptr[1:-1]).to(torch.int64)))

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        sm_scale: float,
    ) -> torch.Tensor:
        q = q.contiguous()
        own, parts, where = [], [], []
        for row, slots in enumerate(self._cold):
            mine = slice(self._offsets[row], self._offsets[row + 1])
            own.append(causal_attention_cpu(q[mine], k[mine], v[mine], sm_scale))
            if slots.numel():
                parts.append(dense_attention_cpu(q[mine], k_cache[slots], v_cache[slots], sm_scale))
                where.append(torch.arange(mine.start, mine.stop))
        for tokens, span in self._hot:
            parts.append(dense_attention_cpu(q[tokens], k_cache[span], v_cache[span], sm_scale))
            where.append(tokens)
        out, lse = (torch.cat(part) for part in zip(*own, strict=True))
        part_out, part_lse = (torch.cat(part) for part in zip(*parts, strict=True))
        merged, _ = merge_states_reference(out, lse, part_out, part_lse, torch.cat(where))
        return merged.to(q.dtype)
