"""Host side of the cascade engine: index arrays of one pass, as numpy values. No CUDA, no FlashInfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from granikv_sglang.backends.base import Geometry
from granikv_sglang.plan import Capacity, Item

Ints = npt.NDArray[np.int32]

LEVELS = 3
"""(item, member) pairs per row that a pass holds: team, role, conversation."""


def cascade_takes(geometry: Geometry) -> bool:
    """Whether FlashInfer's FlashAttention-2 code, which the engine calls, has kernels for these shapes."""
    return geometry.dtype in (torch.bfloat16, torch.float16) and geometry.head_dim in (64, 128, 256)


@dataclass(frozen=True, slots=True)
class PassLimits:
    """What one graph holds, by its batch rows. Every item and pair costs scratch memory and empty blocks, so no more.

    ``items`` grows with a quarter of the rows (small batches: one a row), ``pairs`` with :data:`LEVELS` times the rows.
    ``gqa`` is query heads per KV head.
    """

    rows: int
    gqa: int = 1

    @property
    def items(self) -> int:
        return min(self.rows, max(8, self.rows // 4))

    @property
    def pairs(self) -> int:
        return LEVELS * self.rows

    @property
    def requests(self) -> int:
        """Requests of FlashInfer's prefix pass: the items, and empty ones so that it takes a smaller tile.

        For a graph FlashInfer derives the query rows of a tile (16, 64 or 128) from ``gqa * (pairs - requests + 1)``,
        the most that one request could have. No item has more members than the batch has rows: a small one needs less.
        """
        for tile in (16, 64):
            if self.rows * self.gqa <= tile:
                return max(self.items, self.pairs + 1 - tile // self.gqa)
        return self.items


@dataclass(frozen=True, slots=True)
class CascadeCapacity(Capacity):
    """As :class:`Capacity`, but the batch's own rows bound items and pairs: a graph is made for those."""

    def holds(self, rows: int, items: Sequence[Item]) -> bool:
        limits = PassLimits(rows)
        pairs = sum(len(item.rows) for item in items)
        return rows <= self.rows and len(items) <= limits.items and pairs <= limits.pairs

    @staticmethod
    def of(rows: int) -> CascadeCapacity:
        """For batches of at most ``rows`` requests."""
        return CascadeCapacity(rows, PassLimits(rows).items, PassLimits(rows).pairs)


@dataclass(frozen=True)
class PrefixArrays:
    """The prefix pass: one request for FlashInfer per item, its queries the item's members.

    Attributes:
        qo_indptr: int32 ``[requests + 1]``, run of pairs of each item; requests not in use are empty.
        kv_indptr: int32 ``[requests + 1]``, run of slots of each item.
        starts: int32 ``[requests]``, first slot of each item; its first token position in a paged plan.
        first_row: int32 ``[requests]``, batch row of each item's first member.
        pair_row: int32 ``[pairs]``, batch row of each (item, member).
        list_ptr, list_part: int32, the states to merge for each row: row r has ``list_part[list_ptr[r] : list_ptr[r +
            1]]``, its pairs in order and last its tail, which is state ``limits.pairs + r``.
    """

    qo_indptr: Ints
    kv_indptr: Ints
    starts: Ints
    first_row: Ints
    pair_row: Ints
    list_ptr: Ints
    list_part: Ints

    @property
    def pairs(self) -> int:
        return int(self.pair_row.shape[0])

    @property
    def slots(self) -> int:
        return int(self.kv_indptr[-1])


def prefix_arrays(items: Sequence[Item], limits: PassLimits) -> PrefixArrays:
    """Arrays of a pass; empty items are left out. Raises ValueError where the items exceed ``limits``."""
    items = [item for item in items if item.tokens > 0 and item.rows]
    members = np.fromiter((len(item.rows) for item in items), np.int32, len(items))
    pairs = int(members.sum())
    if len(items) > limits.items or pairs > limits.pairs:
        raise ValueError(
            f"{len(items)} items with {pairs} members exceed a pass of {limits.rows} rows "
            f"({limits.items} and {limits.pairs})"
        )
    pair_row = np.fromiter((row for item in items for row in item.rows), np.int32, pairs)
    if pairs and (pair_row.min() < 0 or pair_row.max() >= limits.rows):
        raise ValueError(f"an item names row {pair_row.max()}, the pass has {limits.rows} rows")
    starts = np.zeros(limits.requests, np.int32)
    starts[: len(items)] = [item.start for item in items]
    first_row = np.zeros(limits.requests, np.int32)
    first_row[: len(items)] = [item.rows[0] for item in items]
    tokens = np.fromiter((item.tokens for item in items), np.int32, len(items))
    list_ptr, list_part = _lists(pair_row, limits)
    return PrefixArrays(
        _indptr(members, limits.requests), _indptr(tokens, limits.requests), starts, first_row, pair_row, list_ptr,
        list_part,
    )  # fmt: skip


def largest_arrays(limits: PassLimits) -> PrefixArrays:
    """Arrays of the largest pass, for a graph's capture: all pairs are queries of the last request, over slot 0.

    FlashInfer wants the query tensor of a capture to be as long as its plan says; what is computed is merged nowhere.
    """
    qo_indptr, kv_indptr = np.zeros(limits.requests + 1, np.int32), np.zeros(limits.requests + 1, np.int32)
    qo_indptr[-1], kv_indptr[-1] = limits.pairs, 1
    list_ptr, list_part = _lists(np.zeros(0, np.int32), limits)
    nothing = np.zeros(limits.requests, np.int32)
    return PrefixArrays(qo_indptr, kv_indptr, nothing, nothing, np.zeros(limits.pairs, np.int32), list_ptr, list_part)


def tail_indptr(seq_lens: npt.NDArray[np.int64], coverage: Ints, rows: int) -> Ints:
    """int32 ``[rows + 1]``: run of slots of each row's tail.

    Args:
        seq_lens: ``[n]``, tokens of each request; n is at most ``rows``, and rows from n on have no tail.
        coverage: ``[at most n]``, tokens that the prefix pass reads; rows past its end have none.
    """
    lens = seq_lens.astype(np.int64)
    lens[: coverage.shape[0]] -= coverage
    return _indptr(np.maximum(lens, 0), rows)


def _indptr(counts: npt.NDArray[np.integer], length: int) -> Ints:
    """Running sum of ``counts``, carried on to ``length + 1`` entries."""
    indptr = np.zeros(length + 1, np.int32)
    np.cumsum(counts, out=indptr[1 : counts.shape[0] + 1])
    indptr[counts.shape[0] + 1 :] = indptr[counts.shape[0]]
    return indptr


def _lists(pair_row: Ints, limits: PassLimits) -> tuple[Ints, Ints]:
    row = np.concatenate((pair_row, np.arange(limits.rows, dtype=np.int32)))
    part = np.concatenate((np.arange(pair_row.shape[0], dtype=np.int32), limits.pairs + np.arange(limits.rows)))
    # Stable: a row's pairs keep their order, parents first, and its tail comes last.
    order = np.argsort(row, kind="stable")
    return _indptr(np.bincount(row, minlength=limits.rows), limits.rows), part[order].astype(np.int32)
