"""Attention with its LSE in one fused pass on a CPU: what the torch engine runs; the references stay the oracle.

The op is torch's own flash attention for CPUs, the one behind ``scaled_dot_product_attention``; called directly because
the public function does not return the LSE. Present in the torch that this project pins.
"""

from __future__ import annotations

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def dense_attention_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q [members, q_heads, d]`` against one dense stretch ``k, v [n, kv_heads, d]``, n > 0.

    The rows of a GQA group are stacked, so K and V are read once for all members. Returns ``out [members, q_heads, d]``
    and ``lse [members, q_heads]``, natural logarithm.
    """
    members, heads, dim = q.shape
    kv_heads = k.shape[1]
    gqa = heads // kv_heads
    stacked = q.view(members, kv_heads, gqa, dim).permute(1, 0, 2, 3).reshape(1, kv_heads, members * gqa, dim)
    out, lse = _flash(stacked, k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0), scale=sm_scale)
    out = out.reshape(kv_heads, members, gqa, dim).permute(1, 0, 2, 3).reshape(members, heads, dim)
    return out, lse.reshape(kv_heads, members, gqa).permute(1, 0, 2).reshape(members, heads)


def causal_attention_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q [n, q_heads, d]`` against ``k, v [n, kv_heads, d]`` of the same n > 0 tokens, each seeing those up to itself.

    Returns as :func:`dense_attention_cpu`.
    """
    gqa = q.shape[1] // k.shape[1]
    k, v = (x.transpose(0, 1).repeat_interleave(gqa, 0).unsqueeze(0) for x in (k, v))
    out, lse = _flash(q.transpose(0, 1).unsqueeze(0), k, v, is_causal=True, scale=sm_scale)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


class CpuTails:
    """Decode attention over private tails; index arrays are built once a step, not once a layer.

    Args:
        tail_slots: int64 ``[rows, width]``, width > 0; entries past a row's length may name any slot.
        tail_lens: int64 ``[rows]``, tokens in each tail, at least 1: a request keeps the token being decoded.
        kv_heads: KV heads of the caches.
        dtype: of q and the caches.
    """

    def __init__(self, tail_slots: torch.Tensor, tail_lens: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> None:
        self._rows, self._width = tail_slots.shape
        self._kv_heads = kv_heads
        valid = torch.arange(self._width).unsqueeze(0) < tail_lens.unsqueeze(1)
        # Entries past the end may name slots that hold anything, NaN included; the row's first slot is its own.
        slots = torch.where(valid, tail_slots, tail_slots[:, :1])
        self._lines = (slots.unsqueeze(1) * kv_heads + torch.arange(kv_heads).view(1, -1, 1)).reshape(-1)
        self._mask = (
            torch.zeros(valid.shape, dtype=dtype).masked_fill_(~valid, float("-inf")).view(self._rows, 1, 1, -1)
        )

    def run(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``q [rows, q_heads, d]`` -> ``out`` in that shape and ``lse [rows, q_heads]``, natural logarithm."""
        rows, heads, dim = q.shape
        gqa = heads // self._kv_heads
        shape = (rows, self._kv_heads, self._width, dim)
        k = k_cache.view(-1, dim).index_select(0, self._lines).view(shape)
        v = v_cache.view(-1, dim).index_select(0, self._lines).view(shape)
        mask = self._mask.expand(rows, 1, gqa, self._width)
        out, lse = _flash(q.view(rows, self._kv_heads, gqa, dim), k, v, attn_mask=mask, scale=sm_scale)
        return out.reshape(rows, heads, dim), lse.reshape(rows, heads)
