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
    valid = torch.arange(max_tail, device=q.device).unsqueeze(0) < tail_lens.unsqueeze(1)
    # Entries past the end may name slots that hold anything, NaN included; the row's first slot is its own.
    slots = torch.where(valid, tail_slots, tail_slots[:, :1])
    k = _gather(k_cache, slots).to(acc)
    v = _gather(v_cache, slots).to(acc)
    stacked = (q.to(acc) * sm_scale).view(rows * kv_heads, heads // kv_heads, dim)
    weights = torch.bmm(stacked, k.transpose(1, 2)).view(rows, heads, max_tail)
    weights.masked_fill_(~valid.unsqueeze(1), float("-inf"))
    top = weights.amax(dim=-1, keepdim=True)
    # exp(-inf - -inf) is NaN for an empty tail; shift by a finite number there.
    shift = torch.where(torch.isinf(top), 0.0, top)
    total = weights.sub_(shift).exp_().sum(dim=-1, keepdim=True)
    out = torch.bmm(weights.view(rows * kv_heads, heads // kv_heads, max_tail), v).view(rows, heads, dim)
    out = torch.where((tail_lens > 0).view(-1, 1, 1), out / total, 0.0)
    return out, (shift + total.log()).squeeze(-1)


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``cache [slots, h, d]`` at ``slots [rows, n]`` -> ``[rows * h, n, d]``, in one gather, no transposed copy."""
    rows, n = slots.shape
    heads, dim = cache.shape[1], cache.shape[2]
    lines = slots.unsqueeze(1) * heads + torch.arange(heads, device=slots.device).view(1, -1, 1)
    return cache.view(-1, dim).index_select(0, lines.reshape(-1)).view(rows * heads, n, dim)
