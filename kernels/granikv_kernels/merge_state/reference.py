"""Pure-torch reference of merging attention states by log-sum-exp.

A state is ``(out, lse)`` over a set of slots; states over disjoint sets merge exactly (Cascade Inference, FlashInfer
2024; the same identity as split-KV in FlashDecoding). ``lse = -inf`` marks an empty set and is the neutral element.
"""

from __future__ import annotations

import torch


def merge_states_reference(
    out: torch.Tensor,
    lse: torch.Tensor,
    pair_out: torch.Tensor,
    pair_lse: torch.Tensor,
    pair_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge per-(item, member) states into their rows.

    Args:
        out, lse: ``[rows, heads, dim]`` and ``[rows, heads]``, the state each row starts from (its tail).
        pair_out, pair_lse: ``[pairs, heads, dim]`` and ``[pairs, heads]``; the natural logarithm throughout.
        pair_row: int64 ``[pairs]``, the row of each pair; a row may have none or several.

    Returns:
        The merged ``out`` and ``lse`` (new tensors). A row whose states are all empty gets output 0 and ``lse = -inf``.
    """
    heads = lse.shape[1]
    index = pair_row.view(-1, 1).expand(-1, heads)
    top = lse.scatter_reduce(0, index, pair_lse, reduce="amax", include_self=True)
    base = torch.where(torch.isinf(top), 0.0, top)
    own = torch.exp(lse - base)
    weight = torch.exp(pair_lse - base[pair_row])
    denominator = own.index_add(0, pair_row, weight)
    numerator = (out * own.unsqueeze(-1)).index_add(0, pair_row, pair_out * weight.unsqueeze(-1))
    merged = numerator / torch.where(denominator == 0, 1.0, denominator).unsqueeze(-1)
    return merged, torch.log(denominator) + base
