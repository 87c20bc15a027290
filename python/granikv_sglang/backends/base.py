"""The interface of an engine for shared decode: what a forward pass gives it and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from granikv_sglang.plan import Capacity, Plan


@dataclass(frozen=True)
class Geometry:
    """Attention shapes of one rank: heads after tensor parallelism, ``dtype`` of q, K, V and the output."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class DecodeBatch:
    """The tensors of one decode pass that attention reads.

    Attributes:
        req_to_token: int32 ``[requests, context]``, slot of each token of each request.
        req_pool_indices: int64 ``[rows]``, row of ``req_to_token`` for each batch row.
        seq_lens: int64 ``[rows]``, tokens of each request, the one being decoded included.
        seq_lens_cpu: the same on the host, where SGLang keeps it.
    """

    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor | None


class SharedDecode(Protocol):
    """Decode attention of one pass that reads every item of a plan once.

    FlashInfer's plan/run split: :meth:`prepare` works on the host, :meth:`begin` and :meth:`run` only launch. An engine
    with ``graph_safe`` may have ``begin`` and ``run`` recorded in a CUDA graph and replayed after another ``prepare``.

    An engine may launch otherwise for plans of another kind; each way is a variant and needs a graph of its own.
    """

    graph_safe: bool
    variants: tuple[str, ...] = ("",)
    """Every value of :meth:`variant_of`, as short names; the plain one is empty."""
    capacity: Capacity | None
    """The largest plan it takes; None where there is no bound."""

    def prepare(self, plan: Plan, batch: DecodeBatch) -> None:
        """Set up a pass: ``plan`` is shared, its rows are the first rows of ``batch`` (the rest is padding)."""
        ...

    def variant_of(self, plan: Plan) -> str:
        """The variant that a pass with this shared plan takes; ``plan.variant`` where that is given."""
        return ""

    def begin(self) -> None:
        """Work on the device once a pass, before the first layer."""
        ...

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float) -> torch.Tensor:
        """Attention of one layer: ``q [rows, q_heads, d]``, caches ``[slots, kv_heads, d]``; shaped as q again."""
        ...


@dataclass(frozen=True)
class ExtendBatch:
    """What one prefill pass is about.

    Attributes:
        req_to_token: int32 ``[requests, context]``, slot of each token of each request.
        req_pool_indices: int64 ``[rows]``, row of ``req_to_token`` for each batch row.
        prefix_lens, extend_lens: cached and new tokens of each row, on the host.
    """

    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    prefix_lens: Sequence[int]
    extend_lens: Sequence[int]


class PrefixExtend(Protocol):
    """Prefill attention of one pass that reads HOT stretches as dense ones; eager, never in a CUDA graph."""

    def prepare(self, plan: Plan, batch: ExtendBatch) -> None:
        """Set up a pass. ``plan.coverage`` is at most the cached tokens of each row. Does not wait for the device."""
        ...

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        sm_scale: float,
    ) -> torch.Tensor:
        """Attention of one layer.

        ``q [tokens, q_heads, d]`` and the new ``k, v [tokens, kv_heads, d]`` of the pass, the tokens of a row side by
        side; caches ``[slots, kv_heads, d]``, which hold the new ones too. All but the last dimension may be strided.
        Causal among a row's new tokens. Shaped as q again.
        """
        ...
