"""Launches of the cascade's own kernels. Each only launches, on the current stream, and may be recorded in a graph."""

from __future__ import annotations

import torch

from granikv_kernels.cascade.kernel import (
    extent_slots_kernel,
    gather_rows_kernel,
    merge_listed_kernel,
    tail_slots_kernel,
)
from granikv_kernels.interpret import launch, next_power_of_2

_BLOCK = 1024
_EXTENT_PROGRAMS = 16
_TAIL_PROGRAMS = 4
"""Programs per item and per tail: a long one is shared out, a short one costs a few that return at once."""


def extent_slots(starts: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor) -> None:
    """Slots of each extent, in order: ``out[indptr[i] : indptr[i + 1]] = starts[i], starts[i] + 1, ...``

    All int32: ``starts [items]``, ``indptr [items + 1]``, ``out`` at least ``indptr[-1]``.
    """
    launch(extent_slots_kernel, (starts.shape[0], _EXTENT_PROGRAMS), starts, indptr, out, BLOCK=_BLOCK)


def tail_slots(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    coverage: torch.Tensor,
    indptr: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Slots of each row's tail: ``out[indptr[r] : indptr[r + 1]] = req_to_token[request of r, coverage[r] : ...]``.

    Args:
        req_to_token: int32 ``[requests, context]``, rows dense.
        req_pool_indices: int32 or int64 ``[rows]``.
        coverage: int32, at least ``[rows]``, first token of the tail.
        indptr: int32, at least ``[rows + 1]``; tail lengths are its differences.
        out: int32, at least ``indptr[rows]``.
    """
    launch(
        tail_slots_kernel, (req_pool_indices.shape[0], _TAIL_PROGRAMS),
        req_to_token, req_to_token.stride(0), req_pool_indices, coverage, indptr, out, BLOCK=_BLOCK,
    )  # fmt: skip


def gather_rows(q: torch.Tensor, rows: torch.Tensor, count: torch.Tensor, out: torch.Tensor) -> None:
    """``out[p] = q[rows[p]]`` for p below ``count[0]``; the rest of ``out`` keeps what it had.

    ``q [n, heads, dim]`` with dense heads and any row stride, ``rows`` int32, ``count`` int32 ``[1]`` or longer,
    ``out [at most len(rows), heads, dim]`` contiguous.
    """
    width = q.shape[1] * q.shape[2]
    launch(
        gather_rows_kernel, (out.shape[0],), q, q.stride(0), rows, count, out,
        WIDTH=width, BLOCK=next_power_of_2(width), num_warps=8 if width >= 4096 else 4,
    )  # fmt: skip


def merge_listed(
    list_ptr: torch.Tensor,
    list_part: torch.Tensor,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge attention states by row; arguments as in :func:`merge_listed_reference`, ``out`` and ``lse`` are written.

    ``out [rows, heads, dim]`` contiguous, of any float type; ``lse`` float32, at least ``[rows, heads]``.
    """
    rows, heads, dim = out.shape
    block_h = min(4, next_power_of_2(heads))
    launch(
        merge_listed_kernel, (rows, -(-heads // block_h)), list_ptr, list_part, part_out, part_lse, out, lse,
        Q_HEADS=heads, D=dim, BLOCK_H=block_h, BLOCK_P=2, num_warps=4,
    )  # fmt: skip
