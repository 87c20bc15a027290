"""Adversarial promotions and evictions of mixed sizes: HOT never takes a place that stock would have for a request."""

from __future__ import annotations

import random
from array import array

import pytest

from granikv_sglang.core import Decline
from support.world import World

SLOTS = 2300


def prompt(rng: random.Random) -> array:
    """Prefixes of 30 to 420 tokens, few of them a multiple of the alignment, and a private end."""
    prefix = rng.randrange(12)
    length = 30 + 35 * prefix
    return array("q", [*range(1000 * prefix, 1000 * prefix + length), 50000 + rng.randrange(1000)])


def play(seed: int, promotions: bool) -> tuple[list[bool], World, int]:
    """Which admissions found memory, the world at the end, and the smallest largest free run while half was free."""
    rng = random.Random(seed)
    world = World(slots=SLOTS, min_tokens=32, min_sharers=2)
    admitted: list[bool] = []
    worst = SLOTS
    for step in range(500):
        tokens, choice = prompt(rng), rng.random()
        victim = rng.randrange(10**6)
        if choice < 0.6:
            req = world.admit(tokens)
            if req is not None:
                ok = world.prefill(req)
                admitted.append(ok)
                if not ok:
                    world.release(req, insert=False)
        elif world.live:
            world.release(world.live[victim % len(world.live)], insert=choice < 0.85)
        if promotions:
            world.promote()
            if world.allocator.available_size() > SLOTS // 2:
                worst = min(worst, world.allocator.largest_free_run())
        if step % 25 == 0:
            world.check()
    return admitted, world, worst


@pytest.mark.parametrize("seed", range(6))
def test_cold_is_never_starved_by_hot(seed):
    """The same schedule with and without promotion: every request that found room without HOT finds it with HOT."""
    with_hot, world, worst = play(seed, promotions=True)
    without, plain, _ = play(seed, promotions=False)
    assert world.counters.promotions >= 3
    assert plain.counters.promotions == 0
    assert len(with_hot) == len(without)
    assert all(ours or not theirs for ours, theirs in zip(with_hot, without, strict=True))
    assert worst >= 256


def test_a_pool_full_of_hot_gives_every_slot_back():
    """Most of the pool is HOT and unlocked; two requests that together need nearly all of it get it."""
    world = World(slots=1500, min_tokens=32)
    for group in range(4):
        tokens = array("q", range(1000 * group, 1000 * group + 250))
        pair = [world.admit(tokens + array("q", [50000 + i])) for i in range(2)]
        for req in pair:
            assert req is not None and world.prefill(req)
        world.promote()
        for req in pair:
            world.release(req, insert=False)
    assert world.tree.hot_tokens() >= 500
    for start in (9000, 20000):
        giant = world.admit(array("q", range(start, start + 740)))
        assert giant is not None and world.prefill(giant)
        world.check()
    assert world.tree.hot_tokens() == 0


def test_holes_of_every_size_decline_and_then_heal():
    """One-slot holes all over the pool: no run, a counted decline, and a run again once the holders are gone."""
    world = World(slots=1200, min_tokens=32)
    holders = []
    for i in range(12):
        req = world.admit(array("q", range(2000 * i, 2000 * i + 50)))
        assert req is not None and world.prefill(req)
        holders.append(req)
    for req in holders[::2]:
        world.release(req, insert=False)
    pair = [world.admit(array("q", [*range(40000, 40400), 7 + i])) for i in range(2)]
    for req in pair:
        assert req is not None and world.prefill(req)
    before = world.allocator.largest_free_run()
    world.promote()
    world.check()
    promoted = world.counters.promotions
    assert promoted or world.counters.declines[Decline.NO_ROOM] == 1
    for req in [*holders[1::2], *pair]:
        world.release(req, insert=False)
    world.evict(10**6)
    world.check()
    assert world.allocator.largest_free_run() == 1200 >= before
