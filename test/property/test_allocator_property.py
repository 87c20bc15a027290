"""Random schedules of the allocator against a plain set: no slot twice, none lost, every run found."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from granikv_sglang.pools import allocator as allocator_module
from granikv_sglang.pools import highest_aligned_start, runs_of
from granikv_sglang.pools.allocator import ElasticAllocator

SLOTS, ALIGN = 300, 16


class AllocatorMachine(RuleBasedStateMachine):
    """Slots by the number, runs, frees of any part in any order, open free groups, flushes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ElasticAllocator(SLOTS, torch.float32, "cpu", None)
        self.held: list[int] = []
        self.waiting: list[int] = []  # freed while a group is open
        self.grouped = False

    @property
    def free(self) -> set[int]:
        return set(range(1, SLOTS + 1)) - set(self.held) - set(self.waiting)

    def _take(self, slots: list[int]) -> None:
        assert set(slots) <= self.free and len(set(slots)) == len(slots)
        self.held += slots

    @rule(count=st.integers(1, 80))
    def alloc(self, count):
        had = len(self.free)
        got = self.pool.alloc(count)
        assert (got is None) == (count > had)
        if got is not None:
            self._take(got.tolist())

    @rule(length=st.integers(1, 120))
    def alloc_run(self, length):
        runs = runs_of(torch.tensor(sorted(self.free), dtype=torch.int64))
        start = self.pool.alloc_run(length, ALIGN)
        assert (start is None) == (highest_aligned_start(runs, length, ALIGN) is None)
        if start is not None:
            assert start % ALIGN == 0
            self._take(list(range(start, start + length)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data):
        some = data.draw(st.lists(st.sampled_from(self.held), unique=True, min_size=1))
        self.pool.free(torch.tensor(some, dtype=torch.int64))
        self.held = [slot for slot in self.held if slot not in some]
        if self.grouped:
            self.waiting += some

    @rule()
    def sort(self):
        self.pool.merge_and_sort_free()

    @rule()
    def group(self):
        if self.grouped:
            self.pool.free_group_end()
            self.waiting = []
        else:
            self.pool.free_group_begin()
        self.grouped = not self.grouped

    @rule()
    def flush(self):
        self.pool.clear()
        self.held, self.waiting, self.grouped = [], [], False

    @invariant()
    def nothing_is_lost(self):
        assert self.pool.peek_free().tolist() == sorted(self.free)
        assert self.pool.available_size() == len(self.free)


@pytest.mark.parametrize(("slack", "share"), [(20, 64), (4096, 1)])
def test_any_schedule_keeps_every_slot(slack, share, monkeypatch):
    monkeypatch.setattr(allocator_module, "RESORT_TOKENS", slack)
    monkeypatch.setattr(allocator_module, "STALE_SHARE", share)
    machine = type("Machine", (AllocatorMachine,), {})
    case = machine.TestCase
    case.settings = settings(
        max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()
