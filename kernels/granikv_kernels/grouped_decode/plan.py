"""Host planning of a grouped decode step: items to balanced prefix units and merge lists. No loop over units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from granikv_kernels.grouped_decode.config import KernelConfig, PrefixTile
from granikv_kernels.grouped_decode.shares import Shares, cut

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
    splits = np.ones_like(tokens)
    lists = []
    for of_class, tile in ((~narrow, config.wide), (narrow, config.narrow)):
        # The two grids run one after the other: each is balanced on its own.
        which = np.flatnonzero(of_class)
        if which.size == 0:
            lists.append(np.zeros((0, UNIT_FIELDS), np.int32))
            continue
        fields = (starts[which], tokens[which], first_pair[which], query_rows[which])
        units, splits[which] = _units_of_class(*fields, tile, kv_heads, num_sms * tile.ctas_per_sm, config)
        lists.append(units)

    # A row's partials lie side by side, the splits of one pair next to each other.
    pair_splits = np.repeat(splits, members)
    by_row = np.argsort(pair_row, kind="stable")
    pair_part = np.empty(pair_row.size, np.int32)
    ends = np.cumsum(pair_splits[by_row])
    pair_part[by_row] = ends - pair_splits[by_row]
    part_ptr = np.zeros(limits.rows + 1, np.int32)
    part_ptr[1:] = np.cumsum(np.bincount(pair_row, weights=pair_splits, minlength=limits.rows))
    return StepPlan(np.concatenate(lists), lists[0].shape[0], pair_row, pair_part, part_ptr, int(ends[-1]))


def _units_of_class(
    starts: Ints,
    tokens: Ints,
    first_pair: Ints,
    query_rows: Ints,
    tile: PrefixTile,
    kv_heads: int,
    programs: int,
    config: KernelConfig,
) -> tuple[Ints, npt.NDArray[Any]]:
    """Units of the items of one grid in launch order, and the splits of each item."""
    row_tiles = -(-query_rows // tile.block_m)
    tiles = -(-tokens // tile.block_n)
    per_split, cost = _choose_chunks(tiles, row_tiles, kv_heads, programs, config)

    def build(item: Any, kv_head: Any, row_tile: Any, split: Any, first: Any, end: Any) -> Ints:
        offset = first * tile.block_n
        first_row = row_tile * tile.block_m
        length = np.minimum(end * tile.block_n, tokens[item]) - offset
        end_row = np.minimum(first_row + tile.block_m, query_rows[item])
        return np.stack(
            (starts[item] + offset, length, first_pair[item], first_row, end_row, kv_head, split, np.zeros_like(item)),
            axis=1,
        ).astype(np.int32)

    if tiles.size <= config.equal_shares_items and programs >= kv_heads and row_tiles.max() == 1:
        shares = cut(tiles, _share_count(tiles, programs // kv_heads, config.part_overhead), config.unit_overhead)
        place, room = _deal(shares, kv_heads, programs), kv_heads * tiles.size + 4 * programs - kv_heads
        if shares.span + config.part_overhead * shares.splits.max() < cost and place.max() < room:
            # A program takes every `programs`-th unit: where its share has none left, an empty unit keeps the step.
            units = np.zeros((int(place.max()) + 1, UNIT_FIELDS), np.int32)
            head = np.repeat(np.arange(kv_heads), shares.item.size)
            s = np.tile(np.arange(shares.item.size), kv_heads)
            units[place] = build(
                shares.item[s], head, np.zeros_like(s), shares.split[s], shares.first[s], shares.end[s]
            )
            return units, shares.splits

    splits = -(-tiles // per_split)
    # Units in (item, split, KV head, row tile) order: row tiles that read the same chunk are neighbours, and share L2.
    item, k = _expand(splits * kv_heads * row_tiles)
    row_tile = k % row_tiles[item]
    k = k // row_tiles[item]
    split = k // kv_heads
    units = build(item, k % kv_heads, row_tile, split, split * per_split[item], (split + 1) * per_split[item])
    return units[_snake(np.argsort(-units[:, 1], kind="stable"), programs)], splits


def _share_count(tiles: Ints, most: int, part_overhead: float) -> int:
    """Shares of one KV head: ``most``, or so few that the merge of the longest item does not cost more than it saves.

    With n shares of T tiles, T / n + part_overhead * n * longest / T is least at n = T / sqrt(part_overhead * longest).
    """
    if part_overhead == 0:
        return most
    return max(1, min(most, round(int(tiles.sum()) / math.sqrt(part_overhead * int(tiles.max())))))


def _deal(shares: Shares, kv_heads: int, programs: int) -> npt.NDArray[Any]:
    """Place of each unit in the work list, ``[kv_heads * units]``, heads outermost: its program, and its turn there.

    The heads of one share go to neighbouring programs: the same DRAM pages. Shares with most units come first, so
    that the last round is dense.
    """
    units_of = np.bincount(shares.share)
    rank = np.empty(units_of.size, np.int64)
    rank[np.argsort(-units_of, kind="stable")] = np.arange(units_of.size)
    program = (rank[shares.share] * kv_heads)[None, :] + np.arange(kv_heads)[:, None]
    return (shares.turn[None, :] * programs + program).reshape(-1)


def _check(items: int, pair_row: Ints, limits: Limits) -> None:
    if items > limits.items or pair_row.size > limits.pairs:
        raise ValueError(
            f"{items} items with {pair_row.size} members exceed the buffers ({limits.items} and {limits.pairs})"
        )
    if pair_row.min() < 0 or pair_row.max() >= limits.rows:
        raise ValueError(f"an item names row {pair_row.max()}, the buffers hold {limits.rows} rows")


def _choose_chunks(
    tiles: Ints, row_tiles: Ints, kv_heads: int, programs: int, config: KernelConfig
) -> tuple[npt.NDArray[Any], float]:
    """Tiles per chunk of each item: the common chunk size whose units are computed and merged soonest, evened out.

    Beside it when that is, in tiles.
    """
    chunk = np.maximum(np.ceil(int(tiles.max()) / np.arange(1, 129)), 1)[:, None]
    splits = np.ceil(tiles / chunk)
    per_split = np.ceil(tiles / splits)
    splits = np.ceil(tiles / per_split)
    units = (splits * row_tiles).sum(axis=1) * kv_heads
    span = np.ceil(units / programs) * (per_split.max(axis=1) + config.unit_overhead)
    span += config.part_overhead * splits.max(axis=1)
    # Beyond four waves of extra units the buffers end. Row 0 is one split for each item, which always fits; ties go to
    # fewer splits.
    span[1:][((splits - 1) * row_tiles).sum(axis=1)[1:] * kv_heads > 4 * programs - kv_heads] = np.inf
    best = int(np.argmin(span))
    return per_split[best].astype(np.int64), float(span[best])


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
