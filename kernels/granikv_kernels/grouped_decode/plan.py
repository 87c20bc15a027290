"""Host planning of a grouped decode step: items to balanced prefix units and merge lists. No loop over units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from granikv_kernels.grouped_decode.config import KernelConfig

Ints = npt.NDArray[np.int32]
Item = tuple[int, int, Sequence[int]]
"""``(first slot, tokens, batch rows)``."""

UNIT_FIELDS = 8


@dataclass(frozen=True)
class Limits:
    """Sizes of the device buffers: what a plan may not exceed. All fixed when the buffers are made."""

    rows: int
    items: int
    pairs: int
    units: int
    parts: int

    @staticmethod
    def of(rows: int, items: int, pairs: int, gqa: int, kv_heads: int, num_sms: int, config: KernelConfig) -> Limits:
        """Enough for every plan of ``items`` items with ``pairs`` members in all, and four waves of units besides."""
        units, parts = 0, pairs
        for tile in (config.wide, config.narrow):
            extra = -(-4 * num_sms * tile.ctas_per_sm // kv_heads)
            units += kv_heads * (items + -(-pairs * gqa // tile.block_m) + extra)
            parts += extra * -(-tile.block_m // gqa)
        return Limits(rows, items, pairs, units, parts)


@dataclass(frozen=True)
class StepPlan:
    """What one step's kernels read.

    Attributes:
        units: ``[units, 8]``, fields as in ``grouped_prefix.kernel.UNIT_FIELDS``: the wide ones, then the narrow
            ones. In each class program p takes p, p + programs, ...
        wide: how many are wide.
        pair_row: ``[pairs]`` batch row of each (item, member).
        pair_part: ``[pairs]`` first partial of each pair; its splits follow.
        part_ptr: ``[rows + 1]`` the run of prefix partials of each row.
        parts: prefix partials in all.
    """

    units: Ints
    wide: int
    pair_row: Ints
    pair_part: Ints
    part_ptr: Ints
    parts: int


def plan_step(
    items: Sequence[Item], gqa: int, kv_heads: int, num_sms: int, config: KernelConfig, limits: Limits
) -> StepPlan:
    """Cut every item into chunks so that the units balance over the programs, and number each row's partials.

    Raises ValueError where the items exceed ``limits`` or name a row outside it.
    """
    items = [item for item in items if item[1] > 0 and len(item[2]) > 0]
    if not items:
        none = np.zeros(0, np.int32)
        return StepPlan(none.reshape(0, UNIT_FIELDS), 0, none, none, np.zeros(limits.rows + 1, np.int32), 0)
    members = np.fromiter((len(item[2]) for item in items), np.int32, len(items))
    pair_row = np.fromiter(chain.from_iterable(item[2] for item in items), np.int32, int(members.sum()))
    _check(len(items), pair_row, limits)
    starts = np.fromiter((item[0] for item in items), np.int32, len(items))
    tokens = np.fromiter((item[1] for item in items), np.int32, len(items))
    first_pair = np.cumsum(members, dtype=np.int32) - members

    query_rows = members * gqa
    narrow = query_rows <= config.narrow_rows
    narrow &= int(tokens[narrow].sum()) * kv_heads >= config.narrow_least
    block_m = np.where(narrow, config.narrow.block_m, config.wide.block_m).astype(np.int32)
    block_n = np.where(narrow, config.narrow.block_n, config.wide.block_n).astype(np.int32)
    row_tiles = -(-query_rows // block_m)
    tiles = -(-tokens // block_n)
    per_split = np.empty_like(tiles)
    for of_class, tile in ((~narrow, config.wide), (narrow, config.narrow)):
        # The two grids run one after the other: each is balanced on its own.
        if of_class.any():
            per_split[of_class] = _choose_chunks(
                tiles[of_class], row_tiles[of_class], kv_heads, num_sms * tile.ctas_per_sm, config.unit_overhead
            )
    splits = -(-tiles // per_split)

    # Units in (item, split, KV head, row tile) order: row tiles that read the same chunk are neighbours, and share L2.
    count = splits * kv_heads * row_tiles
    item, k = _expand(count)
    row_tile = k % row_tiles[item]
    k = k // row_tiles[item]
    kv_head = k % kv_heads
    split = k // kv_heads
    chunk = (per_split * block_n)[item]
    offset = split * chunk
    length = np.minimum(chunk, tokens[item] - offset)
    first_row = row_tile * block_m[item]
    units = np.stack(
        (
            starts[item] + offset,
            length,
            first_pair[item],
            first_row,
            np.minimum(first_row + block_m[item], query_rows[item]),
            kv_head,
            split,
            np.zeros_like(item),
        ),
        axis=1,
    ).astype(np.int32)
    by_length = np.argsort(-length, kind="stable")
    is_narrow = narrow[item[by_length]]
    wide_order = _snake(by_length[~is_narrow], num_sms * config.wide.ctas_per_sm)
    narrow_order = _snake(by_length[is_narrow], num_sms * config.narrow.ctas_per_sm)
    order = np.concatenate((wide_order, narrow_order))

    # A row's partials lie side by side, the splits of one pair next to each other.
    pair_splits = np.repeat(splits, members)
    by_row = np.argsort(pair_row, kind="stable")
    pair_part = np.empty(pair_row.size, np.int32)
    ends = np.cumsum(pair_splits[by_row])
    pair_part[by_row] = ends - pair_splits[by_row]
    part_ptr = np.zeros(limits.rows + 1, np.int32)
    part_ptr[1:] = np.cumsum(np.bincount(pair_row, weights=pair_splits, minlength=limits.rows))
    return StepPlan(units[order], wide_order.size, pair_row, pair_part, part_ptr, int(ends[-1]))


def _check(items: int, pair_row: Ints, limits: Limits) -> None:
    if items > limits.items or pair_row.size > limits.pairs:
        raise ValueError(
            f"{items} items with {pair_row.size} members exceed the buffers ({limits.items} and {limits.pairs})"
        )
    if pair_row.min() < 0 or pair_row.max() >= limits.rows:
        raise ValueError(f"an item names row {pair_row.max()}, the buffers hold {limits.rows} rows")


def _choose_chunks(tiles: Ints, row_tiles: Ints, kv_heads: int, programs: int, overhead: float) -> npt.NDArray[Any]:
    """Tiles per chunk of each item: the common chunk size whose waves of units end soonest, evened out per item."""
    chunk = np.maximum(np.ceil(int(tiles.max()) / np.arange(1, 129)), 1)[:, None]
    splits = np.ceil(tiles / chunk)
    per_split = np.ceil(tiles / splits)
    splits = np.ceil(tiles / per_split)
    units = (splits * row_tiles).sum(axis=1) * kv_heads
    span = np.ceil(units / programs) * (per_split.max(axis=1) + overhead)
    # Beyond four waves of extra units the buffers end. Row 0 is one split for each item, which always fits; ties go to
    # fewer splits.
    span[1:][((splits - 1) * row_tiles).sum(axis=1)[1:] * kv_heads > 4 * programs - kv_heads] = np.inf
    return per_split[int(np.argmin(span))]


def _expand(count: Ints) -> tuple[Any, Any]:
    """For each entry i, ``count[i]`` times i; and beside it 0 .. count[i] - 1."""
    owner = np.repeat(np.arange(count.size), count)
    first = np.cumsum(count) - count
    return owner, np.arange(owner.size) - first[owner]


def _snake(order: Any, programs: int) -> Any:
    """Deal units, longest first, so that strided programs end together: every other round runs backwards.

    The last round may be short and goes to the first programs, so directions are counted from it.
    """
    rounds = -(-order.size // programs)
    for r in range(rounds - 2, -1, -2):
        order[r * programs : (r + 1) * programs] = order[r * programs : (r + 1) * programs][::-1].copy()
    return order
