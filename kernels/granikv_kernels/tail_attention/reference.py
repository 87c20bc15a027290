"""Pure-torch reference of decode attention over each request's private COLD tail (token-level slots)."""

from __future__ import annotations

import torch


def tail_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tail_slots: torch.Tensor,
    tail_lens: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query row per request against its own slots.

    Args:
        q: ``[rows, q_heads, head_dim]``.
        k_cache, v_cache: ``[slots, kv_heads, head_dim]``.
        tail_slots: int64 ``[rows, max_tail]``; entries past a row's length may hold any valid slot and are not used.
        tail_lens: int64 ``[rows]``, tokens in each tail; 0 is allowed.
        sm_scale: multiplied into the scores.

    Returns:
        ``out [rows, q_heads, head_dim]`` and ``lse [rows, q_heads]`` in float32 at least, natural logarithm. An empty
        tail gives output 0 and ``lse = -inf``.
    """
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    acc = torch.promote_types(q.dtype, torch.float32)
    max_tail = tail_slots.shape[1]
    if max_tail == 0:
        return q.new_zeros((rows, heads, dim), dtype=acc), q.new_full((rows, heads), float("-inf"), dtype=acc)
    # [rows * kv_heads, max_tail, d]: one gather a side, then batched GEMMs with the GQA rows stacked.
    k = _gather(k_cache, tail_slots).to(acc)
    v = _gather(v_cache, tail_slots).to(acc)
    valid = torch.arange(max_tail, device=q.device).unsqueeze(0) < tail_lens.unsqueeze(1)
    # Slots past the end may hold anything, NaN included: zero V there, since 0 * NaN is NaN.
    v = v.masked_fill(~valid.repeat_interleave(kv_heads, dim=0).unsqueeze(-1), 0.0)
    stacked = (q.to(acc) * sm_scale).view(rows * kv_heads, heads // kv_heads, dim)
    scores = torch.bmm(stacked, k.transpose(1, 2)).view(rows, heads, max_tail)
    scores = scores.masked_fill(~valid.unsqueeze(1), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # exp(-inf - -inf) is NaN for an empty tail; shift by a finite number there.
    weights = torch.exp(scores - torch.where(torch.isinf(lse), 0.0, lse).unsqueeze(-1))
    out = torch.bmm(weights.view(rows * kv_heads, heads // kv_heads, max_tail), v)
    return out.view(rows, heads, dim), lse


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``cache [slots, h, d]`` at ``slots [rows, n]`` -> ``[rows * h, n, d]``."""
    rows, n = slots.shape
    picked = cache[slots.reshape(-1)].view(rows, n, cache.shape[1], cache.shape[2])
    return picked.transpose(1, 2).reshape(rows * cache.shape[1], n, cache.shape[2])
