"""Pure-torch references of the cascade's own kernels."""

from __future__ import annotations

import math

import torch

from granikv_kernels.merge_state import merge_states_reference

LOG_E_2 = math.log(2.0)


def extent_slots_reference(starts: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """int32 ``[indptr[-1]]``: the slots of each extent, one extent after the other."""
    parts = [torch.arange(s, s + n) for s, n in zip(starts.tolist(), indptr.diff().tolist(), strict=True)]
    return torch.cat(parts).to(torch.int32) if parts else torch.zeros(0, dtype=torch.int32)


def tail_slots_reference(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, coverage: torch.Tensor, indptr: torch.Tensor
) -> torch.Tensor:
    """int32 ``[indptr[-1]]``: the slots of each row's tokens from ``coverage[row]`` on."""
    lens = indptr.diff().tolist()
    rows = zip(req_pool_indices.tolist(), coverage.tolist(), lens, strict=True)
    return torch.cat([req_to_token[request, begin : begin + n] for request, begin, n in rows])


def gather_rows_reference(q: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """``[count, heads, dim]``: the query rows of each (item, member)."""
    return q[rows[:count].to(torch.int64)]


def merge_listed_reference(
    list_ptr: torch.Tensor, list_part: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact merge of the states that each row's list names (Cascade Inference, FlashInfer 2024).

    Args:
        list_ptr: int32 ``[rows + 1]``; row r's states are ``list_part[list_ptr[r] : list_ptr[r + 1]]``.
        list_part: int32, rows of ``part_out``.
        part_out, part_lse: ``[parts, heads, dim]`` and ``[parts, heads]``; the base-2 logarithm, ``-inf`` for empty.

    Returns:
        ``out [rows, heads, dim]`` in float32 at least, and ``lse [rows, heads]``, base 2 again. No state that is not
        empty: 0 and ``-inf``.
    """
    rows = list_ptr.shape[0] - 1
    dtype = torch.promote_types(part_out.dtype, torch.float32)
    pair_row = torch.repeat_interleave(torch.arange(rows), list_ptr.diff().to(torch.int64))
    chosen = list_part[: pair_row.shape[0]].to(torch.int64)
    pair_lse = part_lse[chosen].to(dtype) * LOG_E_2
    pair_out = torch.where(torch.isinf(pair_lse).unsqueeze(-1), 0.0, part_out[chosen].to(dtype))
    none_out = torch.zeros((rows, *part_out.shape[1:]), dtype=dtype)
    none_lse = torch.full((rows, part_out.shape[1]), float("-inf"), dtype=dtype)
    out, lse = merge_states_reference(none_out, none_lse, pair_out, pair_lse, pair_row)
    return out, lse / LOG_E_2
