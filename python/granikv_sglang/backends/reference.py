"""The grouped torch engine: both shared regimes on a CPU. Its references are the oracle for every kernel."""

from __future__ import annotations

import torch

from granikv_kernels.cpu_attention import CpuTails, dense_attention_cpu
from granikv_kernels.grouped_prefix import grouped_prefix_attention_reference
from granikv_kernels.merge_state import merge_states_reference
from granikv_sglang.backends.base import DecodeBatch, SharedDecode
from granikv_sglang.plan import Capacity, Plan


class TorchSharedDecode(SharedDecode):
    """Reads each item as a dense view of the cache, each tail by its slots, and merges the states by log-sum-exp."""

    graph_safe = False
    capacity: Capacity | None = None

    def __init__(self) -> None:
        self._version = -1

    def prepare(self, plan: Plan, batch: DecodeBatch) -> None:
        device = batch.req_to_token.device
        if plan.version != self._version:
            self._version = plan.version
            self._starts = [item.start for item in plan.items]
            self._lens = [item.tokens for item in plan.items]
            self._rows = [torch.tensor(item.rows, dtype=torch.int64, device=device) for item in plan.items]
            self._pair_row = torch.cat(self._rows)
            self._coverage = torch.from_numpy(plan.coverage).to(torch.int64)
        lens = (batch.seq_lens.cpu() if batch.seq_lens_cpu is None else batch.seq_lens_cpu).to(torch.int64)
        tail_lens = lens - self._coverage
        # A request keeps at least the token being decoded; nothing else may be assumed about its tail.
        width = int(tail_lens.max())
        columns = self._coverage.unsqueeze(1) + torch.arange(width).unsqueeze(0)
        columns = torch.minimum(columns, (lens - 1).unsqueeze(1)).to(device)
        rows = batch.req_pool_indices.to(torch.int64).unsqueeze(1)
        self._tail_slots = batch.req_to_token[rows, columns].to(torch.int64)
        self._tail_lens = tail_lens.to(device)
        self._tails: CpuTails | None = None

    def begin(self) -> None:
        pass

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float) -> torch.Tensor:
        if self._tails is None:
            self._tails = CpuTails(self._tail_slots, self._tail_lens, k_cache.shape[1], q.dtype)
        out, lse = self._tails.run(q, k_cache, v_cache, sm_scale)
        pair_out, pair_lse = grouped_prefix_attention_reference(
            q, k_cache, v_cache, self._starts, self._lens, self._rows, sm_scale, dense_attention_cpu
        )
        merged, _ = merge_states_reference(out, lse, pair_out, pair_lse, self._pair_row)
        return merged.to(q.dtype)
