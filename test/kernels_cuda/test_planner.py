"""The CUDA prefix kernel's host planner: every (item, KV head, stacked row, slot) exactly once, and balanced."""

from __future__ import annotations

import numpy as np
import pytest

from granikv_kernels.grouped_prefix_cuda import Grid, plan_worklist
from granikv_kernels.grouped_prefix_cuda.planner import unit_rows

GRIDS = [Grid(132, 2, 128, 128), Grid(132, 1, 128, 176), Grid(264, 1, 64, 64), Grid(8, 2, 128, 128), Grid(2, 2, 64, 64)]


def _check(items, kv_heads, gqa, grid):
    start, length, members = (np.array([i[f] for i in items], dtype=np.int64) for f in range(3))
    work = plan_worklist(start, length, members, kv_heads, gqa, grid)
    first_member = np.cumsum(members) - members
    table = work.units
    assert table.dtype == np.int32 and (table[-1, :, 1] == 0).all()
    covered = [np.zeros((kv_heads, m * gqa, n), dtype=np.int64) for n, m in zip(length, members, strict=True)]
    owner = np.full(work.partial_rows, -1, dtype=np.int64)
    for cta in range(grid.ctas):
        units = table[:, cta]
        count = int((units[:, 1] > 0).sum())
        assert (units[:count, 1] > 0).all() and (units[count:, 1] == 0).all()
        # Pairs first, in the same rounds on both CTAs of a cluster, over the same chunk.
        flags = units[:count, 7]
        assert (np.diff(flags) <= 0).all()
        if grid.cluster == 1:
            assert not flags.any()
        elif flags.any():
            n = int(flags.sum())
            assert (table[:n, cta ^ 1, :4] == units[:n, :4]).all() and (table[:n, cta ^ 1, 7] == 1).all()
            assert (np.abs(table[:n, cta ^ 1, 4] - units[:n, 4]) == grid.tile_m).all()
        for slot, n, head, member, row, rows, part, _ in units[:count]:
            assert 0 <= rows <= grid.tile_m
            if rows == 0:
                continue
            hit = [
                i
                for i in range(len(items))
                if length[i]
                and members[i]
                and first_member[i] == member
                and start[i] <= slot
                and slot + n <= start[i] + length[i]
            ]
            assert len(hit) == 1
            lo = slot - start[hit[0]]
            covered[hit[0]][head, row : row + rows, lo : lo + n] += 1
            assert (owner[part : part + rows] == -1).all()
            owner[part : part + rows] = hit[0]
    for c in covered:
        assert (c == 1).all()
    assert (owner >= 0).all()
    # Merge entries reach exactly the partial rows of their item.
    seen = np.zeros(work.partial_rows, dtype=np.int64)
    pair = 0
    for i, m in enumerate(members):
        for _ in range(m):
            base, kv_stride, splits, split_stride = work.entries[pair]
            pair += 1
            at = (
                base
                + np.arange(kv_heads)[:, None, None] * kv_stride
                + np.arange(splits)[None, :, None] * split_stride
                + np.arange(gqa)
            )
            assert (owner[at] == i).all()
            seen[at.reshape(-1)] += 1
    assert (seen == 1).all()
    return work


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("gqa", [1, 3, 4, 5, 8])
def test_covers_everything_once(grid, gqa):
    _check([(3, 1000, 5), (2000, 129, 1), (4001, 1, 70), (5000, 300, 33)], 2, gqa, grid)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_empty_items(grid):
    work = _check([(0, 0, 3), (7, 50, 0), (100, 77, 2), (0, 0, 0)], 3, 4, grid)
    assert work.splits.tolist()[:2] == [0, 0]
    assert plan_worklist([], [], [], 8, 4, grid).units.shape[0] == 1


def test_random_forests():
    rng = np.random.default_rng(7)
    for _ in range(15):
        at, items = 0, []
        for _ in range(rng.integers(1, 12)):
            n = int(rng.integers(0, 700))
            at += int(rng.integers(1, 50))
            items.append((at, n, int(rng.integers(0, 90))))
            at += n
        _check(items, int(rng.integers(1, 5)), int(rng.integers(1, 9)), GRIDS[int(rng.integers(len(GRIDS)))])


@pytest.mark.parametrize("requests", [64, 128])
def test_one_long_prefix_fills_the_gpu(requests):
    grid = Grid(132, 2, 128, 128)
    work = plan_worklist([0], [16384], [requests], 8, 4, grid)
    even = 16384 / 128 * 8 * (requests * 4 / 128) / 132
    assert work.makespan <= 1.04 * even + 1.5
    assert work.units.shape[0] == 2  # one unit a CTA


def test_unit_rows_name_each_members_heads():
    members = [np.array([7, 2, 9]), np.array([4])]
    grid = Grid(4, 1, 8, 16)
    work = plan_worklist([0, 100], [33, 20], [3, 1], 2, 5, grid)
    rows = unit_rows(work.units, np.concatenate(members), 5, 8)
    assert rows.shape == (*work.units.shape[:2], 8)
    seen = set()
    for unit, source in zip(work.units.reshape(-1, 8), rows.reshape(-1, 8), strict=True):
        count = unit[5] if unit[1] else 0
        assert (source[count:] == -1).all()
        item = 0 if unit[3] == 0 else 1
        for i in range(count):
            stacked = unit[4] + i
            row, head = members[item][stacked // 5], unit[2] * 5 + stacked % 5
            assert source[i] == row << 8 | head
            seen.add((item, int(row), int(head)))
    assert len(seen) == 4 * 10
