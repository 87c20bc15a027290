"""Pure-torch reference of grouped prefix attention: the CPU engine and the oracle of every kernel of this op.

One **item** is a contiguous run of slots that several rows of the batch share. Each item's K and V are read once, as a
dense view of the cache, for all member rows together: scores are ``[kv_heads, members * gqa, length]`` GEMMs.

An item with no members or length 0 contributes nothing: its pairs get output 0 and ``lse = -inf``, the neutral element
of :func:`granikv_kernels.merge_state.merge_states_reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Dense = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""``dense(q [m, q_heads, d], k [n, kv_heads, d], v, sm_scale) -> (out, lse)``, n > 0."""


def dense_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One dense stretch, n > 0: one batched GEMM a side, rows of a GQA group stacked. Shapes as in :data:`Dense`."""
    members, heads, dim = q.shape
    kv_heads = k.shape[1]
    gqa = heads // kv_heads
    stacked = q.view(members, kv_heads, gqa, dim).permute(1, 0, 2, 3).reshape(kv_heads, members * gqa, dim)
    weights = torch.bmm(stacked * sm_scale, k.permute(1, 2, 0))
    top = weights.amax(dim=-1, keepdim=True)
    total = weights.sub_(top).exp_().sum(dim=-1, keepdim=True)
    out = torch.bmm(weights, v.transpose(0, 1)).div_(total)
    lse = (top + total.log()).squeeze(-1)
    out = out.view(kv_heads, members, gqa, dim).permute(1, 0, 2, 3).reshape(members, heads, dim)
    return out, lse.view(kv_heads, members, gqa).permute(1, 0, 2).reshape(members, heads)


def grouped_prefix_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    item_start: Sequence[int],
    item_len: Sequence[int],
    member_rows: Sequence[torch.Tensor],
    sm_scale: float,
    dense: Dense = dense_attention_reference,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every (item, member) pair over the item's slots.

    Args:
        q: ``[rows, q_heads, head_dim]``.
        k_cache, v_cache: ``[slots, kv_heads, head_dim]``; ``q_heads`` is a multiple of ``kv_heads``.
        item_start, item_len: first slot and number of slots of each item, host integers; any start, any length >= 0.
        member_rows: per item the int64 row indices into ``q``, on q's device.
        sm_scale: multiplied into the scores.
        dense: what computes one item.

    Returns:
        ``out [pairs, q_heads, head_dim]`` and ``lse [pairs, q_heads]`` (float32 at least, natural logarithm), pairs in
        item order and member order. The definition is FlashAttention's (Dao 2022): softmax over the item's slots alone,
        lse the logarithm of its denominator.
    """
    heads, dim = q.shape[1], q.shape[2]
    acc = torch.promote_types(q.dtype, torch.float32)
    outs, lses = [], []
    for start, length, rows in zip(item_start, item_len, member_rows, strict=True):
        members = rows.shape[0]
        if members == 0:
            continue
        if length == 0:
            outs.append(q.new_zeros((members, heads, dim), dtype=acc))
            lses.append(q.new_full((members, heads), float("-inf"), dtype=acc))
            continue
        k = k_cache[start : start + length]
        v = v_cache[start : start + length]
        out, lse = dense(q[rows].to(acc), k.to(acc), v.to(acc), sm_scale)
        outs.append(out)
        lses.append(lse)
    if not outs:
        return q.new_zeros((0, heads, dim), dtype=acc), q.new_zeros((0, heads), dtype=acc)
    return torch.cat(outs), torch.cat(lses)
