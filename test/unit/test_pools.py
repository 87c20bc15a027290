"""Runs and the elastic allocator."""

import pytest
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

from granikv_sglang.pools import KnownFree, highest_aligned_start, runs_of
from granikv_sglang.pools import allocator as pools
from granikv_sglang.pools.allocator import RESORT_TOKENS, ElasticAllocator


def allocator(size: int = 1024) -> ElasticAllocator:
    return ElasticAllocator(size, torch.float32, "cpu", None)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_runs_of_finds_maximal_runs():
    assert runs_of(ids(1, 2, 3, 7, 9, 10)) == [(1, 3), (7, 1), (9, 2)]
    assert runs_of(ids()) == []
    assert runs_of(ids(5)) == [(5, 1)]


def test_highest_aligned_start_prefers_the_top_and_respects_alignment():
    assert highest_aligned_start([(1, 1000)], 300, 256) == 512
    assert highest_aligned_start([(1, 600), (700, 400)], 300, 256) == 768
    assert highest_aligned_start([(257, 254)], 1, 256) is None
    assert highest_aligned_start([(256, 256)], 256, 256) == 256
    assert highest_aligned_start([(256, 256)], 257, 256) is None


def test_capacity_is_stock_capacity():
    stock = TokenToKVPoolAllocator(1000, torch.float32, "cpu", None, False)
    ours = allocator(1000)
    assert ours.available_size() == stock.available_size() == 1000
    assert sorted(ours.alloc(1000).tolist()) == sorted(stock.alloc(1000).tolist())
    assert ours.alloc(1) is None


def test_cold_hands_out_low_slots_first():
    pool = allocator()
    first = pool.alloc(100)
    assert first.tolist() == list(range(1, 101))
    pool.free(first[10:20])
    pool.merge_and_sort_free()
    assert pool.alloc(10).tolist() == list(range(11, 21))


def test_freed_slots_come_back_low_first_within_the_slack():
    pool = allocator(4 * RESORT_TOKENS)
    for _ in range(3 * RESORT_TOKENS // 64):
        pool.free(pool.alloc(64))
    assert int(pool.alloc(64).max()) <= RESORT_TOKENS + 64


def test_a_full_pool_hands_out_freed_slots_unsorted_until_the_next_merge():
    pool = allocator(64)
    taken = pool.alloc(64)
    pool.free(taken[[40, 3, 21]])
    assert pool.alloc(2).tolist() == [41, 4]  # as they came back
    pool.free(taken[[5]])
    assert pool.free_slots().tolist() == [6, 22]
    pool.free(taken[[50, 1]])
    assert pool.alloc(5) is None
    assert pool.peek_free().tolist() == [2, 6, 22, 51]
    assert pool.free_slots().tolist() == [2, 6, 22, 51]  # sorted again, though nothing waits to be merged


def test_alloc_run_carves_from_the_top_and_gives_back():
    pool = allocator()
    start = pool.alloc_run(300, 256)
    assert start == 512
    assert pool.available_size() == 724
    assert not set(range(512, 812)) & set(pool.alloc(724).tolist())
    pool.free(torch.arange(512, 812))
    assert pool.available_size() == 300


def test_alloc_run_declines_without_change_when_fragmented():
    pool = allocator()
    held = pool.alloc(1024)
    pool.free(held[::2])
    assert pool.alloc_run(256, 256) is None
    assert pool.available_size() == 512
    assert pool.largest_free_run() == 1


@pytest.mark.parametrize("hole", [1, 255, 256, 700, 1024])
def test_alloc_run_never_hands_out_a_held_slot(hole):
    pool = allocator()
    held = pool.alloc(1024)
    pool.free(held[held != hole])
    taken: set[int] = set()
    while (start := pool.alloc_run(100, 256)) is not None:
        run = set(range(start, start + 100))
        assert not run & taken
        assert hole not in run
        taken |= run
    assert pool.available_size() == 1023 - len(taken)


def test_known_runs_shrink_from_below_and_lose_what_is_taken():
    known = KnownFree([(1, 3), (10, 600)])
    known.hand_out(5)  # 1 to 3, 10, 11
    assert known.take_run(256, 256) == 256
    assert known.take_run(256, 256) is None
    assert known.take_run(98, 512) == 512
    assert known.take_run(1, 1) == 255
    known.hand_out(243)  # 12 to 254
    assert known.take_run(1, 1) is None
    known.hand_out(7)


@pytest.fixture
def reads(monkeypatch):
    """How often the free slots were read to the host."""
    found: list[int] = []
    monkeypatch.setattr(pools, "runs_of", lambda slots: found.append(len(slots)) or runs_of(slots))
    return found


def test_a_run_is_taken_without_reading_the_free_slots(reads):
    """To read them is to wait for the pass in flight; what has been handed out since says enough."""
    pool = allocator(4096)
    held = pool.alloc(1000)
    pool.free(held[:60])
    assert pool.alloc_run(1000, 256) == 3072
    assert pool.alloc_run(500, 256) == 2560
    pool.alloc(50)
    assert pool.alloc_run(1000, 256) == 1536 and reads == []
    # 485 slots above the first 1050 are known, in no run that long: now it looks.
    assert pool.alloc_run(900, 1) is None and len(reads) == 1
    assert pool.alloc_run(500, 1) is None and pool.alloc_run(475, 1) is not None and len(reads) == 2


def test_the_highest_run_is_found_again_after_much_came_free(reads):
    pool = allocator()
    assert (pool.alloc_run(300, 256), pool.alloc_run(200, 256)) == (512, 256)
    pool.free(torch.arange(512, 812))
    assert pool.alloc_run(300, 256) == 512 and len(reads) == 1
    pool.clear()
    assert pool.alloc_run(300, 256) == 512 and len(reads) == 1


@pytest.mark.gpu
def test_taking_a_run_does_not_wait_for_the_gpu():
    pool = ElasticAllocator(100_000, torch.float16, "cuda", None)
    held = pool.alloc(50_000)
    pool.free(held[torch.randperm(50_000, device="cuda")[:1500]])
    torch.cuda.set_sync_debug_mode("error")
    try:
        start = pool.alloc_run(10_000, 256)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert start == 89_856
    left = pool.peek_free()
    assert len(left) == len(left.unique()) == 41_500 and not ((left >= start) & (left < start + 10_000)).any()


def test_looking_at_the_free_slots_changes_nothing():
    """A state that is read on one rank only, or an audit, must not change what is handed out next."""
    looked, left = allocator(), allocator()
    for pool in (looked, left):
        held = pool.alloc(600)
        pool.free(held[100:300])
        if pool is looked:
            assert pool.largest_free_run() == 424
            assert pool.peek_free().tolist() == [*range(101, 301), *range(601, 1025)]
    assert looked.alloc(500).tolist() == left.alloc(500).tolist()


def test_an_open_free_group_is_not_free_yet():
    pool = allocator()
    held = pool.alloc(1024)
    pool.free_group_begin()
    pool.free(held)
    assert pool.alloc_run(10, 256) is None
    pool.free_group_end()
    assert pool.alloc_run(10, 256) == 768
