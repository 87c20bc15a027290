"""Adversarial promotions and evictions of mixed sizes: HOT never takes a place that stock would have for a request."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest

from granikv_sglang.core import Decline
from granikv_sglang.tree import radix
from support.world import FakeReq, World

SLOTS = 2300


def prompt(rng: random.Random) -> array:
    """Prefixes of 30 to 420 tokens, few of them a multiple of the alignment, and a private end."""
    prefix = rng.randrange(12)
    length = 30 + 35 * prefix
    return array("q", [*range(1000 * prefix, 1000 * prefix + length), 50000 + rng.randrange(1000)])


@dataclass
class Played:
    """What came of a schedule: which admissions found memory, the smallest largest free run while half was free, and of
    the prefix tokens that live requests shared, how many they could have had HOT and how many were."""

    world: World
    admitted: list[bool] = field(default_factory=list)
    worst: int = SLOTS
    shared: int = 0
    hot: int = 0

    def look(self) -> None:
        world = self.world
        if world.allocator.available_size() > SLOTS // 2:
            self.worst = min(self.worst, world.allocator.largest_free_run())
        groups: dict[int, list[FakeReq]] = {}
        for req in world.live:
            groups.setdefault(req.tokens[0], []).append(req)
        for reqs in groups.values():
            if len(reqs) > 1:
                self.shared += sum(len(req.tokens) - 1 for req in reqs)
                self.hot += sum(span.length for req in reqs for _, span in world.tree.hot_path(req.last_node))


def play(seed: int, promotions: bool) -> Played:
    rng = random.Random(seed)
    played = Played(World(slots=SLOTS, min_tokens=32, min_sharers=2))
    world = played.world
    for step in range(500):
        tokens, choice = prompt(rng), rng.random()
        victim = rng.randrange(10**6)
        if choice < 0.6:
            req = world.admit(tokens)
            if req is not None:
                ok = world.prefill(req)
                played.admitted.append(ok)
                if not ok:
                    world.release(req, insert=False)
        elif world.live:
            world.release(world.live[victim % len(world.live)], insert=choice < 0.85)
        if promotions:
            world.promote()
            played.look()
        if step % 25 == 0:
            world.check()
    return played


@pytest.mark.parametrize("seed", range(6))
def test_cold_is_never_starved_by_hot(seed, monkeypatch):
    """The same schedule with and without promotion: every request that found room without HOT finds it with HOT.

    And HOT finds room in a pool that is always about full: whole, in parts, or where unlocked leaves have been.
    """
    monkeypatch.setattr(radix, "EXTENT_ALIGN", 16)  # as small beside these prefixes as it is beside real ones
    with_hot, without = play(seed, promotions=True), play(seed, promotions=False)
    counters = with_hot.world.counters
    assert counters.promotions >= 3
    assert without.world.counters.promotions == 0
    assert len(with_hot.admitted) == len(without.admitted)
    assert all(ours or not theirs for ours, theirs in zip(with_hot.admitted, without.admitted, strict=True))
    assert with_hot.worst >= 256
    assert counters.partial_promotions > 0
    assert with_hot.hot >= 0.85 * with_hot.shared


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
