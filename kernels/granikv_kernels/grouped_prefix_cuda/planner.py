"""Host planner of the CUDA prefix kernel: items -> per-CTA lists of units and the table the merge reads. numpy only.

Every item is cut into chunks of whole key blocks, the same cuts for all its row tiles and KV heads, so that a member's
partial results are an arithmetic sequence (one :data:`MERGE_FIELDS` record). How many chunks is found by trying a few
chunk lengths and scheduling each: the slowest cluster decides, and a unit costs its blocks plus a fixed overhead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
Index = npt.NDArray[np.int64]
Real = npt.NDArray[np.float64]

UNIT_FIELDS = ("slot", "len", "kv_head", "member", "row", "rows", "part", "paired")
MERGE_FIELDS = ("base", "kv_stride", "splits", "split_stride")

# Loading Q, filling the pipeline and writing the result, in key blocks.
UNIT_OVERHEAD = 1.5
_TRIES = np.array([1.0, 1.04, 1.1, 1.25, 0.75, 0.52, 0.4, 0.345, 0.26, 0.2], dtype=np.float64)


@dataclass(frozen=True)
class Grid:
    """What the planner must know of the kernel and the GPU."""

    ctas: int  # a multiple of `cluster`
    cluster: int
    tile_m: int
    tile_n: int


@dataclass
class Worklist:
    units: IntArray  # [rounds, ctas, 8]; a unit of length 0 ends a CTA's list
    entries: IntArray  # [pairs, 4], item by item, member by member
    partial_rows: int
    splits: IntArray  # per item
    makespan: float  # the slowest CTA, in key blocks


def plan_worklist(
    item_start: npt.ArrayLike, item_len: npt.ArrayLike, item_members: npt.ArrayLike, kv_heads: int, gqa: int, grid: Grid
) -> Worklist:
    """Plan items (first slot, slots, number of members); the members of item i follow those of item i - 1."""
    start = np.asarray(item_start, dtype=np.int64)
    length = np.asarray(item_len, dtype=np.int64)
    members = np.asarray(item_members, dtype=np.int64)
    first_member = np.concatenate(([0], np.cumsum(members)[:-1])) if members.size else members
    alive = (length > 0) & (members > 0)
    rows = members * gqa
    blocks = -(-length // grid.tile_n)
    tiles = -(-rows // grid.tile_m)
    pairs = np.where(alive, tiles // 2 if grid.cluster == 2 else 0, 0)
    solos = np.where(alive, tiles - 2 * pairs, 0)
    # With two tiles of which the last is short, a pair still shares its loads; a lone last tile is a solo unit.

    best: tuple[float, Index] | None = None
    total = float(((2 * pairs + solos) * blocks).sum()) * kv_heads
    for chunk in _chunk_lengths(total / grid.ctas, int(blocks.max(initial=1))):
        splits = np.where(alive, -(-blocks // chunk), 0)
        made = _schedule_load(blocks, splits, pairs, solos, kv_heads, grid)
        if best is None or made < best[0] - 1e-6:
            best = (made, splits)
    assert best is not None
    makespan, splits = best

    size = rows * splits * kv_heads
    part_base = np.concatenate(([0], np.cumsum(size)[:-1])) if size.size else size
    fields = _units(start, length, blocks, splits, first_member, rows, part_base, pairs, solos, kv_heads, grid)
    return Worklist(
        units=_place(*fields, grid),
        entries=_entries(members, splits, rows, part_base, alive, gqa),
        partial_rows=int(size.sum()),
        splits=splits.astype(np.int32),
        makespan=makespan,
    )


def unit_rows(units: IntArray, member_rows: npt.NDArray[np.integer], gqa: int, tile_m: int) -> IntArray:
    """``[rounds, ctas, tile_m]``: where each stacked row of a unit is in q, ``row << 8 | query head``; -1: none."""
    out = np.full((*units.shape[:2], tile_m), -1, dtype=np.int32)
    busy = np.nonzero(units[:, :, 5] > 0)
    unit = units[busy]
    if unit.size:
        width = int(unit[:, 5].max())  # small groups leave most of a tile empty
        local = np.arange(width, dtype=np.int32)
        table = np.arange(width + gqa, dtype=np.int32)
        offset = unit[:, 4, None] % gqa + local  # divided by look-up: integer division is slow here
        at = (unit[:, 3] + unit[:, 4] // gqa)[:, None] + (table // gqa)[offset]
        np.minimum(at, member_rows.size - 1, out=at)  # past the tile's rows: not used
        source = (member_rows.astype(np.int32)[at] << 8) | ((unit[:, 2] * gqa)[:, None] + (table % gqa)[offset])
        source[local >= unit[:, 5, None]] = -1
        out[busy[0], busy[1], :width] = source
    return out


def _chunk_lengths(ideal: float, longest: int) -> list[int]:
    """Chunk lengths worth trying, around an even share per CTA and its fractions."""
    tried = np.ceil(np.maximum(ideal * _TRIES, 1.0)).astype(np.int64)
    return list(dict.fromkeys(int(c) for c in np.minimum(tried, longest)))


def _schedule_load(
    blocks: Index,
    splits: Index,
    pairs: Index,
    solos: Index,
    kv_heads: int,
    grid: Grid,
) -> float:
    safe = np.maximum(splits, 1)
    cost = -(-blocks // safe) + UNIT_OVERHEAD
    load = np.zeros(grid.ctas)
    if pairs.any():
        _, cluster_load = _assign(np.repeat(cost, pairs * splits * kv_heads), np.zeros(grid.ctas // 2))
        load = np.repeat(cluster_load, 2)
    if solos.any():
        _, load = _assign(np.repeat(cost, solos * splits * kv_heads), load)
    return float(load.max(initial=0.0))


def _assign(cost: Real, load: Real) -> tuple[Index, Real]:
    """Longest first, a round at a time, to the least loaded bins. Returns (bin per unit, load)."""
    order = np.argsort(-cost, kind="stable")
    where = np.empty(cost.size, dtype=np.int64)
    load = load.copy()
    for lo in range(0, cost.size, load.size):
        batch = order[lo : lo + load.size]
        bins = np.argsort(load, kind="stable")[: batch.size]
        where[batch] = bins
        load[bins] += cost[batch]
    return where, load


def _units(
    start: Index,
    length: Index,
    blocks: Index,
    splits: Index,
    first_member: Index,
    rows: Index,
    part_base: Index,
    pairs: Index,
    solos: Index,
    kv_heads: int,
    grid: Grid,
) -> tuple[IntArray, IntArray]:
    """Paired units (the first tile's record; the second follows from it) and solo units, each ``[n, 8]``."""

    def build(count: Index, tile_step: int, tile_offset: Index, paired: int) -> IntArray:
        per_item = count * splits * kv_heads
        item = np.repeat(np.arange(per_item.size), per_item)
        index = np.arange(item.size) - np.repeat(np.cumsum(per_item) - per_item, per_item)
        # Neighbouring CTAs take tiles of the same chunk first: what one fetched, the others find in L2.
        n_tiles = np.maximum(count, 1)[item]
        tile = index % n_tiles * tile_step + tile_offset[item]
        head = index // n_tiles % kv_heads
        split = index // (n_tiles * kv_heads)
        # Chunks differ by at most one block.
        base, extra = np.divmod(blocks[item], splits[item])
        first = (split * base + np.minimum(split, extra)) * grid.tile_n
        end = np.minimum(first + (base + (split < extra)) * grid.tile_n, length[item])
        row = tile * grid.tile_m
        unit = np.empty((item.size, len(UNIT_FIELDS)), dtype=np.int32)
        unit[:, 0] = start[item] + first
        unit[:, 1] = end - first
        unit[:, 2] = head
        unit[:, 3] = first_member[item]
        unit[:, 4] = row
        unit[:, 5] = np.minimum(rows[item] - row, grid.tile_m * (1 + paired))
        unit[:, 6] = part_base[item] + (head * splits[item] + split) * rows[item] + row
        unit[:, 7] = paired
        return unit

    zero = np.zeros_like(pairs)
    return build(pairs, 2, zero, 1), build(solos, 1, 2 * pairs, 0)


def _place(paired: IntArray, solo: IntArray, grid: Grid) -> IntArray:
    """Per-CTA lists, paired units first: afterwards the two CTAs of a cluster need not stay in step."""
    load = np.zeros(grid.ctas)
    depth = np.zeros(grid.ctas, dtype=np.int64)
    placed: list[tuple[Index, Index, IntArray]] = []
    if paired.size:
        cost = _cost(paired, grid)
        where, cluster_load = _assign(cost, np.zeros(grid.ctas // 2))
        load = np.repeat(cluster_load, 2)
        second = paired.copy()
        second[:, 4] += grid.tile_m
        second[:, 6] += grid.tile_m
        second[:, 5] = np.maximum(paired[:, 5] - grid.tile_m, 0)
        first = paired.copy()
        first[:, 5] = np.minimum(paired[:, 5], grid.tile_m)
        turn = _turns(where, cost)
        placed += [(turn, 2 * where, first), (turn, 2 * where + 1, second)]
        depth = np.repeat(np.bincount(where, minlength=grid.ctas // 2), 2).astype(np.int64)
    if solo.size:
        cost = _cost(solo, grid)
        where, _ = _assign(cost, load)
        placed.append((depth[where] + _turns(where, cost), where, solo))
        depth = depth + np.bincount(where, minlength=grid.ctas).astype(np.int64)
    table = np.zeros((int(depth.max(initial=0)) + 1, grid.ctas, len(UNIT_FIELDS)), dtype=np.int32)
    for turn, cta, unit in placed:
        table[turn, cta] = unit
    return table


def _cost(unit: IntArray, grid: Grid) -> Real:
    return np.asarray(-(-unit[:, 1] // grid.tile_n) + UNIT_OVERHEAD, dtype=np.float64)


def _turns(where: Index, cost: Real) -> Index:
    """Position of each unit in its bin's list, in unit order."""
    order = np.argsort(where, kind="stable")
    in_order = where[order]
    position = np.arange(where.size) - np.searchsorted(in_order, in_order, side="left")
    turn = np.empty(where.size, dtype=np.int64)
    turn[order] = position
    return turn


def _entries(
    members: Index,
    splits: Index,
    rows: Index,
    part_base: Index,
    alive: npt.NDArray[np.bool_],
    gqa: int,
) -> IntArray:
    item = np.repeat(np.arange(members.size), members)
    member = np.arange(item.size) - np.repeat(np.cumsum(members) - members, members)
    out = np.empty((item.size, len(MERGE_FIELDS)), dtype=np.int32)
    out[:, 0] = part_base[item] + member * gqa
    out[:, 1] = splits[item] * rows[item]
    out[:, 2] = np.where(alive[item], splits[item], 0)
    out[:, 3] = rows[item]
    return out
