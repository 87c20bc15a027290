"""Pure-torch reference of grouped decode: the three references of its parts, composed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from granikv_kernels.grouped_prefix.reference import grouped_prefix_attention_reference
from granikv_kernels.merge_state.reference import merge_states_reference
from granikv_kernels.tail_attention.reference import tail_attention_reference


def grouped_decode_reference(
    items: Sequence[tuple[int, int, Sequence[int]]],
    coverage: npt.NDArray[np.int32],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as in :class:`GroupedDecode`'s ``plan`` and ``run``.

    Returns:
        ``out [rows, q_heads, head_dim]`` and ``lse [rows, q_heads]``, float32 at least, natural logarithm.
    """
    rows, device = q.shape[0], q.device
    begin = torch.zeros(rows, dtype=torch.int64, device=device)
    n = min(rows, coverage.shape[0])
    begin[:n] = torch.from_numpy(coverage[:n].astype(np.int64)).to(device)
    lens = (seq_lens.to(torch.int64) - begin).clamp_min(0)
    longest = int(lens.max()) if rows else 0
    at = begin.unsqueeze(1) + torch.arange(longest, device=device)
    at = at.clamp_max(req_to_token.shape[1] - 1)
    slots = req_to_token[req_pool_indices.to(torch.int64).unsqueeze(1), at].to(torch.int64)
    valid = torch.arange(longest, device=device).unsqueeze(0) < lens.unsqueeze(1)
    slots = torch.where(valid, slots, 0)
    out, lse = tail_attention_reference(q, k_cache, v_cache, slots, lens, sm_scale)

    members = [torch.as_tensor(list(rows_), dtype=torch.int64, device=device) for _, _, rows_ in items]
    pair_out, pair_lse = grouped_prefix_attention_reference(
        q, k_cache, v_cache, [i[0] for i in items], [i[1] for i in items], members, sm_scale
    )
    pair_row = torch.cat(members) if members else torch.zeros(0, dtype=torch.int64, device=device)
    return merge_states_reference(out, lse, pair_out, pair_lse, pair_row)
