"""GraniRadixCache on chosen schedules: what the property test hits by chance is pinned down here."""

import random
from array import array
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from granikv_sglang.core import AuditError, Decline, Span
from granikv_sglang.plugin import promoter
from granikv_sglang.tree import radix
from granikv_sglang.tree.radix import EVICT_AHEAD_SHARE
from support.world import World


def words(*parts: tuple[int, int]) -> array:
    """``(start, length)`` stretches of consecutive token ids."""
    return array("q", [t for start, length in parts for t in range(start, start + length)])


def serve(world: World, tokens: array, **kwargs):
    req = world.admit(tokens, **kwargs)
    assert req is not None
    assert world.prefill(req)
    return req


PREFIX = (1000, 100)


def test_promotion_moves_a_shared_prefix_onto_an_aligned_run():
    world = World()
    reqs = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2, 3)]
    free = world.allocator.available_size()
    world.promote()
    world.check()
    ((_, span),) = world.tree.extents()
    assert span.length == 100
    assert span.start % 256 == 0
    assert world.allocator.available_size() == free
    assert [world.tree.hot_path(r.last_node)[0][1] for r in reqs] == [span] * 3
    assert world.counters.promoted_tokens == world.tree.hot_tokens() == 100


def test_a_later_request_matches_the_hot_slots():
    world = World()
    _ = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2)]
    world.promote()
    late = world.admit(words(PREFIX, (9, 5)))
    assert late is not None
    ((_, span),) = world.tree.extents()
    assert late.prefix_indices.tolist() == list(range(span.start, span.stop))


def test_a_split_is_two_spans_over_the_same_slots_without_a_copy():
    world = World()
    _ = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2)]
    world.promote()
    before = world.tree.extents()[0][1]
    serve(world, words((1000, 40), (5000, 10)))
    world.check()
    spans = [span for _, span in world.tree.extents()]
    assert spans == [Span(before.start, 40), Span(before.start + 40, 60)]
    assert world.counters.promotions == 1
    assert world.counters.hot_splits == 1


def test_a_prefix_path_names_positions_where_all_members_hold_the_same_slots():
    world = World(min_tokens=64)
    reqs = [serve(world, words(PREFIX, (3000, 50), (i, 3))) for i in (1, 2)] + [serve(world, words(PREFIX, (9, 3)))]
    paths = [world.tree.prefix_path(req.last_node) for req in reqs]
    assert [span.length for _, span in paths[0][:2]] == [100, 50]
    assert [span.start for _, span in paths[0][:2]] == [0, 100]
    assert paths[2][0] == paths[0][0] and paths[0][1] == paths[1][1]
    table = world.tree.req_to_token_pool.req_to_token
    for node in {node for path in paths for node, _ in path}:
        held = [
            tuple(table[req.req_pool_idx, span.start : span.stop].tolist())
            for req, path in zip(reqs, paths, strict=True)
            for other, span in path
            if other == node
        ]
        assert len(set(held)) == 1
    assert world.tree.prefix_path(None) == ()


def test_two_levels_make_two_extents():
    world = World(min_tokens=64)
    roles = [serve(world, words(PREFIX, (3000, 50), (i, 3))) for i in (1, 2, 3)]
    others = [serve(world, words(PREFIX, (i, 3))) for i in (11, 12)]
    world.promote()
    world.promote()
    world.check()
    assert [span.length for _, span in world.tree.hot_path(roles[0].last_node)] == [100, 50]
    assert [span.length for _, span in world.tree.hot_path(others[0].last_node)] == [100]
    assert world.counters.extended_promotions == 1


def test_hot_nodes_are_evicted_like_any_other():
    world = World()
    reqs = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2)]
    world.promote()
    for req in reqs:
        world.release(req, insert=True)
    world.check()
    assert world.evict(10_000) == 110
    world.check()
    assert world.tree.hot == {}
    assert world.allocator.available_size() == world.allocator.size
    assert world.counters.hot_evicted_tokens == 100


def test_eviction_goes_a_little_ahead_so_that_a_full_pool_is_not_searched_at_every_step():
    world = World(slots=10 * EVICT_AHEAD_SHARE)
    for i in range(30):
        world.release(serve(world, words((100 * i, 4))), insert=True)
    assert world.evict(0) == 0
    assert world.evict(1) == 12  # ten slots are a share of the pool; leaves of four
    assert world.evict(25) == 28
    world.check()


def test_flush_forgets_every_span():
    world = World()
    reqs = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2)]
    world.promote()
    for req in reqs:
        world.release(req, insert=True)
    world.flush()
    world.check()
    assert world.tree.hot == {}


def test_equal_text_under_two_keys_never_shares():
    world = World()
    ours = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2)]
    theirs = [serve(world, words(PREFIX, (i, 5)), extra_key="b") for i in (1, 2)]
    world.promote()
    world.promote()
    world.check()
    spans = {world.tree.hot_path(req.last_node)[0][1] for req in ours} | {
        world.tree.hot_path(req.last_node)[0][1] for req in theirs
    }
    assert len(spans) == 2


def test_no_room_is_declined_once_and_changes_nothing():
    world = World(slots=300)
    _ = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2)]
    # Hold what is left, so that no run of even 25 is free and nothing may be evicted.
    serve(world, words((7000, world.allocator.available_size() - 20)))
    world.promote()
    world.promote()
    world.check()
    assert world.counters.declines[Decline.NO_ROOM] == 1
    assert world.tree.hot == {}


def fill_up(world: World, first_free: int) -> None:
    """Hold every free slot below ``first_free``; the slots from there to the pool's end are one free run."""
    serve(world, words((7000, world.allocator.available_size() - (world.allocator.size + 1 - first_free))))


def test_a_prefix_without_a_run_for_all_of_it_is_promoted_in_parts():
    """The old slots of the first part make room for the second."""
    world = World(slots=2047)
    reqs = [serve(world, words((1000, 1000), (i, 5))) for i in (1, 2, 3)]
    fill_up(world, 1280)
    for promoted in (768, 1000):
        world.promote()
        world.check()
        assert world.tree.hot_tokens() == promoted
        assert [sum(span.length for _, span in world.tree.hot_path(r.last_node)) for r in reqs] == [promoted] * 3
    world.promote()
    assert (world.counters.promotions, world.counters.partial_promotions) == (2, 1)
    assert world.counters.declines[Decline.NO_ROOM] == 0
    for req in reqs:
        world.release(req, insert=False)
    late = serve(world, words((1000, 1000), (9, 5)))
    assert len(world.tree.hot_path(late.last_node)) == 2
    world.check()


@pytest.mark.parametrize("first", [300, 500])
def test_a_part_ends_inside_a_node_or_between_two(first):
    world = World(slots=2035)
    reqs = [serve(world, words((1000, first), (2000, 900 - first), (i, 5))) for i in (1, 2)]
    outsider = serve(world, words((1000, first), (3000, 5)))  # splits the prefix
    world.release(outsider, insert=False)
    fill_up(world, 1536)
    world.promote()
    world.check()
    assert world.counters.partial_promotions == 1
    assert world.tree.hot_tokens() == 500
    lengths = [span.length for _, span in world.tree.hot_path(reqs[0].last_node)]
    assert lengths == ([500] if first == 500 else [300, 200])
    assert world.tree.hot_path(reqs[1].last_node) == world.tree.hot_path(reqs[0].last_node)


def test_unlocked_leaves_give_way_to_a_part_where_not_to_the_whole():
    """Slots 1 to 810 hold the prefix and its requests, 811 to 1410 an old leaf, those behind a running request."""
    world = World(slots=2200)
    reqs = [serve(world, words((20000, 800), (i, 5))) for i in (1, 2)]
    old = serve(world, words((9000, 600)))
    fill_up(world, 2201)
    world.release(old, insert=True)
    world.promote()
    world.check()
    assert world.counters.room_evictions == 1
    assert world.counters.partial_promotions == 1
    assert [span.length for _, span in world.tree.hot_path(reqs[1].last_node)] == [200]


def test_where_the_prefix_worth_most_has_no_room_the_next_one_is_promoted():
    world = World(slots=1400)
    big = [serve(world, words((20000, 900), (i, 5))) for i in (1, 2, 3)]
    small = [serve(world, words(PREFIX, (i, 5))) for i in (11, 12)]
    fill_up(world, 1280)
    world.promote()
    world.check()
    assert [len(world.tree.hot_path(r.last_node)) for r in big + small] == [0, 0, 0, 1, 1]
    assert world.counters.declines[Decline.NO_ROOM] == 0


@pytest.mark.parametrize("seed", range(6))
def test_prefixes_of_a_full_batch_all_become_hot_whatever_order_they_arrive_in(seed, monkeypatch):
    """Eight prefixes in a pool that holds them, the private parts and little more."""
    monkeypatch.setattr(radix, "EXTENT_ALIGN", 16)  # as small beside these prefixes as it is beside real ones
    rng = random.Random(seed)
    lengths = [100 * (group + 1) for group in range(8)]
    world = World(slots=sum(lengths) + 32 * 21 + 900, max_rows=64)
    members = [(group, i) for group in range(8) for i in range(4)]
    rng.shuffle(members)
    reqs = []
    for group, i in members:
        reqs.append(serve(world, words((1000 * group + 1000, lengths[group]), (50000 + 100 * group + 10 * i, 5))))
        if rng.random() < 0.3:
            world.promote()
    for _ in range(16):
        for req in reqs:
            assert world.decode(req, 7)
        world.promote()
        world.check()
    assert world.tree.hot_tokens() >= 0.95 * sum(lengths)


def test_room_is_made_by_evicting_unlocked_leaves_that_stand_in_the_way():
    world = World(slots=800)
    old = serve(world, words((9000, 600)))
    _ = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2)]
    world.release(old, insert=True)
    assert world.allocator.largest_free_run() < 100
    world.promote()
    world.check()
    assert world.tree.hot_tokens() == 100
    assert world.counters.room_evictions == 1


def test_a_failed_copy_leaves_the_prefix_cold(monkeypatch):
    world = World()
    reqs = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2)]

    def fail(*_):
        raise torch.OutOfMemoryError("no staging buffer")

    monkeypatch.setattr("granikv_sglang.plugin.promoter.copy_slots_reference", fail)
    world.promote()
    world.check()
    assert world.tree.hot == {}
    assert world.counters.declines[Decline.COPY_FAILED] == 1
    assert world.tree.hot_path(reqs[0].last_node) == ()


def test_a_part_whose_copy_fails_is_no_promotion(monkeypatch):
    world = World(slots=2047)
    reqs = [serve(world, words((1000, 1000), (i, 5))) for i in (1, 2)]
    fill_up(world, 1280)

    def fail(*_):
        raise torch.OutOfMemoryError("no staging buffer")

    monkeypatch.setattr("granikv_sglang.plugin.promoter.copy_slots_reference", fail)
    world.promote()
    world.check()
    assert (world.counters.promotions, world.counters.partial_promotions) == (0, 0)
    assert world.counters.declines[Decline.COPY_FAILED] == 1
    assert world.tree.hot_path(reqs[0].last_node) == ()


def test_promotion_while_the_same_prompt_is_half_prefilled():
    world = World()
    half = world.admit(words(PREFIX, (77, 30)))
    assert half is not None
    _ = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2)]
    world.prefill(half, 60)
    world.promote()
    world.check()
    world.prefill(half, 110)
    world.check()
    world.prefill(half)
    world.check()
    assert world.tree.hot_path(half.last_node)[0][1].length == 60 or len(world.tree.hot_path(half.last_node)) >= 1


@pytest.mark.parametrize("fault", ["leak", "double", "span", "row"])
def test_the_audit_notices(fault):
    world = World()
    reqs = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2)]
    world.promote()
    if fault == "leak":
        world.allocator.alloc(3)
    elif fault == "double":
        world.allocator.free(reqs[0].last_node.value[:1])
    elif fault == "span":
        node_id = world.tree.extents()[0][0]
        world.tree.hot[node_id] = Span(0, 100)
    else:
        world.rows.req_to_token[reqs[0].req_pool_idx, 3] += 1
    with pytest.raises(AuditError):
        world.check()


class NoReading(TorchDispatchMode):
    """Refuses what waits for a device: reading a value, and shapes that depend on values."""

    WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique", "aten._unique2")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not str(func).startswith(self.WAITS), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("known", [True, False])
def test_a_promotion_does_not_wait_for_the_pass_in_flight(known, monkeypatch):
    """What runs on the forward stream only launches; free slots, where they must be read at all, are read before."""
    entered = []

    @contextmanager
    def forward_stream(_scheduler):
        entered.append(True)
        with NoReading():
            yield

    monkeypatch.setattr(promoter, "_forward_stream", forward_stream)
    world = World()
    reqs = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2, 3)]
    if known:
        with NoReading():
            world.promote()
    else:
        world.allocator.free(world.allocator.alloc(world.allocator.size // 8))  # too much to know without looking
        with pytest.raises(AssertionError, match="waits"), NoReading():
            world.allocator.alloc_run(10, 1)
        world.promote()
    world.check()
    assert entered and world.counters.promotions == 1
    assert [len(world.tree.hot_path(r.last_node)) for r in reqs] == [1] * 3


def test_no_room_is_found_before_anything_is_put_on_the_forward_stream(monkeypatch):
    monkeypatch.setattr(promoter, "_forward_stream", lambda _: pytest.fail("nothing is to be copied"))
    world = World()
    _ = [serve(world, words(PREFIX, (i, 5))) for i in (1, 2)]
    monkeypatch.setattr(world.tree, "reserve", lambda _tokens: None)
    monkeypatch.setattr(world.tree, "room", lambda: 0)
    world.promote()
    world.check()
    assert world.counters.declines[Decline.NO_ROOM] == 1 and world.counters.promotions == 0
