"""Host planning: every slot of an item scored once for each member and head, partials disjoint, limits kept."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from granikv_kernels.grouped_decode.config import KernelConfig, PrefixTile, TailTile
from granikv_kernels.grouped_decode.plan import Limits, plan_step

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


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("gqa", [1, 3, 4, 8])
def test_units_cover_every_pair_once(gqa: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_heads, rows, num_sms = 2, 24, 20
    items = _random_items(rng, int(rng.integers(0, 6)), rows)
    pairs = max(1, sum(len(m) for _, _, m in items))
    limits = Limits.of(rows, max(1, len(items)), pairs, gqa, kv_heads, num_sms, CONFIG)
    step = plan_step(items, gqa, kv_heads, num_sms, CONFIG, limits)
    assert step.units.shape[0] <= limits.units and step.parts <= limits.parts
    live = [item for item in items if item[1] > 0 and item[2]]
    flat = [(i, row) for i, (_, _, members) in enumerate(live) for row in members]
    assert step.pair_row.tolist() == [row for _, row in flat]

    scored: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    written = np.zeros((step.parts, kv_heads * gqa), np.int32)
    for u, (first, slots, first_pair, first_row, end_row, kv_head, split, _) in enumerate(step.units.tolist()):
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
