"""Random schedules of the cache layer against a plain dict model, audited after every operation."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.world import World

BLOCK = 24
VOCABULARY = 4


def prompt_of(blocks: list[int], tail: int) -> array:
    """Tokens of a few fixed blocks and one odd token: prompts share prefixes often and end apart."""
    tokens = array("q")
    for block in blocks:
        tokens.extend(1000 * block + i for i in range(BLOCK))
    tokens.append(10 + tail)
    return tokens


prompts = st.builds(prompt_of, st.lists(st.integers(1, VOCABULARY), min_size=1, max_size=6), st.integers(0, 3))
keys = st.sampled_from([None, None, None, "tenant-b"])
pick = st.integers(0, 10**6)


class CacheMachine(RuleBasedStateMachine):
    """Admission, chunked prefill, decode, finish, abort, promotion, eviction and flush in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(slots=1100, min_tokens=32, min_sharers=2)

    def _any(self, index: int):
        return self.world.live[index % len(self.world.live)]

    @rule(prompt=prompts, key=keys, max_new=st.integers(0, 64))
    def admit(self, prompt, key, max_new):
        self.world.admit(prompt, key, max_new)

    @rule(prompt=prompts, key=keys)
    def admit_twins(self, prompt, key):
        """Two identical prompts arriving together: both prefill, the second is deduplicated."""
        twins = [self.world.admit(prompt, key) for _ in range(2)]
        for req in twins:
            if req is not None and not self.world.prefill(req):
                self.world.release(req, insert=False)

    @precondition(lambda self: self.world.live)
    @rule(index=pick, chunk=st.integers(1, 100))
    def prefill(self, index, chunk):
        req = self._any(index)
        if req.filled < len(req.tokens):
            self.world.prefill(req, req.filled + chunk)

    @precondition(lambda self: self.world.live)
    @rule(index=pick, token=st.integers(0, 5))
    def decode(self, index, token):
        req = self._any(index)
        if req.filled == len(req.tokens):
            self.world.decode(req, token)

    @precondition(lambda self: self.world.live)
    @rule(index=pick, insert=st.booleans())
    def release(self, index, insert):
        self.world.release(self._any(index), insert)

    @rule()
    def promote(self):
        self.world.promote()

    @rule(tokens=st.integers(1, 400))
    def evict(self, tokens):
        self.world.evict(tokens)

    @precondition(lambda self: not self.world.live)
    @rule()
    def flush(self):
        self.world.flush()

    @invariant()
    def conserved(self):
        self.world.check()


CacheMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_long_random_schedule_keeps_every_slot(seed):
    """Operations weighted towards sharing, so that promotions, splits and HOT evictions all really happen."""
    rng = random.Random(seed)
    world = World(slots=2300, min_tokens=32, min_sharers=2)
    for _ in range(700):
        action = rng.random()
        if action < 0.3:
            blocks = [rng.choice([1, 1, 1, 2]), *(rng.randint(1, VOCABULARY) for _ in range(rng.randint(1, 6)))]
            req = world.admit(prompt_of(blocks, rng.randint(0, 50)), rng.choice([None, None, "b"]))
            if req is not None and rng.random() < 0.8 and not world.prefill(req):
                world.release(req, insert=False)
        elif action < 0.55 and world.live:
            req = rng.choice(world.live)
            (world.decode(req, 7) if req.filled == len(req.tokens) else world.prefill(req, req.filled + 40))
        elif action < 0.7 and world.live:
            world.release(rng.choice(world.live), insert=rng.random() < 0.6)
        elif action < 0.9:
            world.promote()
        elif action < 0.99:
            world.evict(rng.randint(1, 500))
        else:
            for req in list(world.live):
                world.release(req, insert=False)
            world.flush()
        world.check()
    counters = world.counters
    assert counters.promotions > 5
    assert counters.hot_splits > 0
    assert counters.hot_evictions > 0
    assert counters.extended_promotions > 0
