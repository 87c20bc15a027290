"""The interface of an engine for shared decode: what a forward pass gives it and what it gives back."""

from __future__ import annotations

from typing import Protocol

import torch

from granikv_sglang.plan import Plan


class SharedDecode(Protocol):
    """Decode attention of one pass that reads every item of a plan once.

    FlashInfer's plan/run split: :meth:`prepare` runs once a pass on the host and builds index arrays, :meth:`run` once
    a layer.
    """

    def prepare(
        self, plan: Plan, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        """Set up a pass.

        Args:
            plan: a shared plan for this batch, rows in batch order.
            req_to_token: int32 ``[requests, context]``, slot of each token of each request.
            req_pool_indices: int64 ``[rows]``, row of ``req_to_token`` for each batch row.
            seq_lens_cpu: int64 ``[rows]`` on the host, tokens of each request, the one being decoded included.
        """
        ...

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float) -> torch.Tensor:
        """Attention of one layer: ``q [rows, q_heads, d]``, caches ``[slots, kv_heads, d]``; shaped as q again."""
        ...
