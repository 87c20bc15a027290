"""Host planning: every slot of an item scored once for each member and head, partials disjoint, limits kept."""

from __future__ import annotations

import dataclasses
import statistics
import time

import numpy as np
import pytest
import torch

from granikv_kernels.grouped_decode.config import KernelConfig, PrefixTile, TailTile, default_config, small_config
from granikv_kernels.grouped_decode.plan import Limits, StepPlan, plan_step
from granikv_kernels.grouped_decode.shares import SNAP, cut
from granikv_sglang.core import Regime
from granikv_sglang.plan import Features, Item, Shape
from granikv_sglang.plan.work import SMALL_ROWS, Kind, Machine, shared_work

CONFIG = KernelConfig(PrefixTile(64, 64, 3, 8, 1), PrefixTile(16, 32, 3, 4, 2), 16, 0, TailTile(64, 3, 4, 4))


def _random_items(rng: np.random.Generator, count: int, rows: int) -> list[tuple[int, int, list[int]]]:
    items = []
    for _ in range(count):
        members = rng.choice(rows, int(rng.integers(0, rows + 1)), replace=False)
        items.append((int(rng.integers(0, 10**6)), int(rng.integers(0, 5000)), [int(m) for m in members]))
    return items


def _item_of(items: list[tuple[int, int, list[int]]], pair: int) -> int:
    ends = np.cumsum([len(members) for _, _, members in items])
    return int(np.searchsorted(ends, pair, side="right"))


@pytest.mark.parametrize("equal_shares", [False, True])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("gqa", [1, 3, 4, 8])
def test_units_cover_every_pair_once(gqa: int, seed: int, equal_shares: bool) -> None:
    config = dataclasses.replace(CONFIG, equal_shares_items=32 * equal_shares)
    rng = np.random.default_rng(seed)
    kv_heads, rows, num_sms = 2, 24, 20
    items = _random_items(rng, int(rng.integers(0, 6)), rows)
    pairs = max(1, sum(len(m) for _, _, m in items))
    limits = Limits.of(rows, max(1, len(items)), pairs, gqa, kv_heads, num_sms, config)
    step = plan_step(items, gqa, kv_heads, num_sms, config, limits)
    assert step.units.shape[0] <= limits.units and step.parts <= limits.parts
    live = [item for item in items if item[1] > 0 and item[2]]
    flat = [(i, row) for i, (_, _, members) in enumerate(live) for row in members]
    assert step.pair_row.tolist() == [row for _, row in flat]

    scored: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    written = np.zeros((step.parts, kv_heads * gqa), np.int32)
    for u, (first, slots, first_pair, first_row, end_row, kv_head, split, _) in enumerate(step.units.tolist()):
        if slots == 0:
            assert equal_shares and first_row == end_row  # keeps the step of a program that has nothing left
            continue
        tile = CONFIG.wide if u < step.wide else CONFIG.narrow
        assert slots > 0 and 0 < end_row - first_row <= tile.block_m
        assert (len(live[_item_of(live, first_pair)][2]) * gqa > CONFIG.narrow_rows) == (u < step.wide)
        for r in range(first_row, end_row):
            pair, head = first_pair + r // gqa, kv_head * gqa + r % gqa
            scored.setdefault((pair, head, 0), []).append((first, slots))
            part = int(step.pair_part[pair]) + split
            written[part, head] += 1
            row = flat[pair][1]
            assert step.part_ptr[row] <= part < step.part_ptr[row + 1]
    assert (written == 1).all()
    assert len(scored) == len(flat) * kv_heads * gqa
    for (pair, _, _), spans in scored.items():
        start, tokens, _ = live[flat[pair][0]]
        at = start
        for first, slots in sorted(spans):
            assert first == at
            at += slots
        assert at == start + tokens


def test_units_balance_over_the_programs() -> None:
    """The shape of the single-prefix target: one wave, no program with more than 1.15 of the mean."""
    config = KernelConfig()
    limits = Limits.of(128, 1, 128, 4, 8, 132, config)
    step = plan_step([(256, 16384, list(range(128)))], 4, 8, 132, config, limits)
    load = np.zeros(132)
    np.add.at(load, np.arange(step.units.shape[0]) % 132, step.units[:, 1])
    assert load.max() <= 1.15 * load.mean()


def test_uneven_groups_balance() -> None:
    config = KernelConfig()
    items = [(i * 20000, 2048 * (i + 1), list(range(8 * i, 8 * i + 8))) for i in range(8)]
    limits = Limits.of(64, 8, 64, 4, 8, 132, config)
    step = plan_step(items, 4, 8, 132, config, limits)
    assert step.wide == 0
    load = np.zeros(264)
    np.add.at(load, np.arange(step.units.shape[0]) % 264, step.units[:, 1])
    assert load.max() <= 1.3 * load.mean()


def test_plan_takes_at_most_a_millisecond() -> None:
    """64 groups, 256 rows. Best of several, so that a busy machine does not fail the test."""
    items = [(i * 5000, 512 + 61 * i, list(range(4 * i, 4 * i + 4))) for i in range(64)]
    limits = Limits.of(256, 64, 256, 4, 8, 132, CONFIG)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        plan_step(items, 4, 8, 132, CONFIG, limits)
        times.append(time.perf_counter() - began)
    assert min(times) <= 1e-3, statistics.median(times)


def test_little_narrow_work_goes_to_the_wide_grid() -> None:
    """Four requests on one 16K prefix: the wide grid starts at once and runs beside the tails."""
    config = KernelConfig()
    limits = Limits.of(4, 1, 4, 4, 8, 132, config)
    step = plan_step([(256, 16384, [0, 1, 2, 3])], 4, 8, 132, config, limits)
    assert step.wide == step.units.shape[0] > 0


def _groups(lengths: list[int], members: int) -> list[tuple[int, int, list[int]]]:
    return [(i * 20000, n, list(range(i * members, (i + 1) * members))) for i, n in enumerate(lengths)]


def _longest(step: StepPlan, programs: int, block_n: int, overhead: float) -> float:
    """Cost in tiles of the program that ends last, over the tiles of all."""
    tiles = -(-step.units[:, 1] // block_n)
    cost = np.zeros(programs)
    np.add.at(cost, np.arange(tiles.size) % programs, tiles + overhead * (tiles > 0))
    return float(cost.max() / (tiles.sum() / programs))


@pytest.mark.parametrize(
    "items",
    [
        pytest.param(_groups([2048 * (i + 1) for i in range(8)], 16), id="8 x 16"),
        pytest.param(_groups([16384, 12288, 8192, 4096], 16), id="4 x 16"),
        pytest.param(_groups([1024] * 40 + [16384], 3), id="many short, one long"),
    ],
)
@pytest.mark.parametrize("narrow_rows", [0, 64])
def test_equal_shares_end_sooner(items: list[tuple[int, int, list[int]]], narrow_rows: int) -> None:
    costs = []
    rows = sum(len(members) for _, _, members in items)
    for equal_shares in (False, True):
        config = dataclasses.replace(KernelConfig(), narrow_rows=narrow_rows, equal_shares_items=32 * equal_shares)
        limits = Limits.of(rows, len(items), rows, 4, 8, 132, config)
        step = plan_step(items, 4, 8, 132, config, limits)
        assert step.units.shape[0] <= limits.units and step.parts <= limits.parts
        tile = config.narrow if narrow_rows else config.wide
        assert step.wide == (0 if narrow_rows else step.units.shape[0])
        costs.append(_longest(step, 132 * tile.ctas_per_sm, tile.block_n, config.unit_overhead))
    assert costs[1] < costs[0] or (len(items) > 8 and costs[1] == costs[0])  # many short items balance as they are


@pytest.mark.parametrize("seed", range(20))
def test_a_line_is_cut_into_equal_shares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tiles = rng.integers(1, 300, int(rng.integers(1, 30)))
    count, overhead = int(rng.integers(1, 40)), 6.0
    shares = cut(tiles, count, overhead)
    at = [0] * tiles.size
    for item, split, first, end in zip(shares.item, shares.split, shares.first, shares.end, strict=True):
        assert first == at[item] < end and split <= shares.splits[item]
        at[item] = int(end)
    assert at == tiles.tolist()
    assert shares.splits.sum() == shares.item.size and shares.share.max() < count
    for share in range(count):
        assert shares.turn[shares.share == share].tolist() == list(range(int((shares.share == share).sum())))
    # An equal part of everything, one overhead for a start within an item, and what snapping moves.
    assert shares.span <= (tiles.sum() + overhead * tiles.size) / count + overhead + 2 * SNAP + 1


@pytest.mark.parametrize("heads", [(8, 1, 128), (9, 3, 64), (32, 8, 128), (40, 8, 128)])
@pytest.mark.parametrize(
    "groups",
    [[(2, 512)], [(2, 8192)], [(16, 16384)], [(64, 4096)], [(128, 32768)], [(8, 2048)] * 4, [(16, 2048), (16, 16384)]],
)
def test_the_cost_model_knows_how_many_partials_a_plan_makes(
    heads: tuple[int, int, int], groups: list[tuple[int, int]]
) -> None:
    """The model does not run the planner: it has a formula, which must stay near it."""
    q_heads, kv_heads, head_dim = heads
    gqa, items, row = q_heads // kv_heads, [], 0
    for members, tokens in groups:
        items.append(Item(row * 40000, tokens, tuple(range(row, row + members)), row))
        row += members
    small = small_config(torch.bfloat16, head_dim)
    assert small is not None
    config = small if max(m for m, _ in groups) * gqa <= SMALL_ROWS else default_config(torch.bfloat16, head_dim)
    limits = Limits.of(row, len(items), row, gqa, kv_heads, 132, config)
    step = plan_step([(i.start, i.tokens, i.rows) for i in items], gqa, kv_heads, 132, config, limits)
    longest = max(tokens for _, tokens in groups)
    shape = Shape(q_heads, kv_heads, head_dim)
    f = Features.of(items, longest, row, shape, sum(m * n for m, n in groups) + row)
    work = shared_work(f, Machine(Kind.CUDA, 132), Regime.BATCHED_GEMM)
    planned = int(np.diff(step.part_ptr).max())
    assert planned / 1.6 - 2 <= work.partials - 1 <= planned * 1.6 + 2  # one is the private tail's
