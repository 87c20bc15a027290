"""The promotion policy and the choice of room, on plain values."""

import numpy as np
import pytest

from granikv_sglang.core import Decline
from granikv_sglang.tree.policy import COPY_READS, NodeView, Segment, rank_segments, reads_saved
from granikv_sglang.tree.room import BLOCKED, least_recent_window

STEPS = 100


def node(node_id, parent, tokens, path, sharers, hot=False, steps=STEPS):
    return NodeView(node_id, parent, tokens, path, hot, (steps,) * sharers)


def choose(*views, min_tokens=100, min_sharers=2, min_segment=25):
    """The segment worth most, if any, and the declines."""
    segments, declines = rank_segments(views, min_tokens=min_tokens, min_sharers=min_sharers, min_segment=min_segment)
    return (segments[0] if segments else None), declines


def test_a_long_shared_node_is_chosen():
    segment, declines = choose(node(1, None, 200, 200, 4), node(2, 1, 10, 210, 1))
    assert segment is not None
    assert (segment.node_ids, segment.tokens) == ((1,), 200)
    assert segment.saving == 200 * (3 * STEPS - COPY_READS)
    assert declines == []


def test_private_nodes_are_neither_chosen_nor_counted():
    assert choose(node(1, None, 500, 500, 1)) == (None, [])


def test_short_and_thin_prefixes_are_declined_with_the_reason():
    assert choose(node(1, None, 99, 99, 4))[1] == [(1, Decline.TOO_SHORT)]
    assert choose(node(1, None, 200, 200, 2), min_sharers=3)[1] == [(1, Decline.FEW_SHARERS)]


def test_a_prefix_whose_requests_are_about_to_end_is_declined():
    assert choose(node(1, None, 200, 200, 4, steps=1))[1] == [(1, Decline.NO_SAVING)]
    assert choose(node(1, None, 200, 200, 4, steps=2))[0] is not None


def test_a_path_split_by_a_request_now_gone_is_one_segment():
    segment, _ = choose(node(1, None, 60, 60, 3), node(2, 1, 60, 120, 3), node(3, 2, 60, 180, 3))
    assert segment is not None
    assert segment.node_ids == (1, 2, 3)


def test_a_short_common_root_is_promoted_together_with_the_longer_path_below_it():
    segment, _ = choose(node(1, None, 40, 40, 5), node(2, 1, 90, 130, 3), node(3, 1, 80, 120, 2))
    assert segment is not None
    assert segment.node_ids == (1, 2)


def test_a_stretch_below_a_cold_shared_node_is_never_chosen_alone():
    # Node 2 alone would save more than node 1 alone, but HOT below COLD would not be a leading span.
    segment, _ = choose(node(1, None, 110, 110, 3), node(2, 1, 900, 1010, 2))
    assert segment is not None
    assert segment.node_ids[0] == 1


def test_below_a_hot_node_only_the_cold_rest_is_promoted():
    segment, _ = choose(node(1, None, 500, 500, 6, hot=True), node(2, 1, 60, 560, 3))
    assert segment is not None
    assert segment.node_ids == (2,)
    assert choose(node(1, None, 500, 500, 6, hot=True), node(2, 1, 20, 520, 3))[1] == [(2, Decline.TOO_SHORT)]


def test_the_largest_saving_wins_and_ties_go_to_the_lower_id():
    segment, _ = choose(node(1, None, 200, 200, 2), node(2, None, 200, 200, 5))
    assert segment is not None
    assert segment.node_ids == (2,)
    segment, _ = choose(node(7, None, 200, 200, 3), node(4, None, 200, 200, 3))
    assert segment is not None
    assert segment.node_ids == (4,)


def test_reads_saved_counts_one_read_a_step_while_anyone_lives():
    assert reads_saved([10]) == 0
    assert reads_saved([10, 10, 10]) == 20
    assert reads_saved([1, 100]) == 1
    assert reads_saved([]) == 0


def test_room_takes_the_window_whose_newest_slot_is_oldest():
    rank = np.full(2048, BLOCKED, dtype=np.int64)
    rank[256:512], rank[512:768], rank[1024:1280] = 5, 0, 3
    assert least_recent_window(rank, 256, 256) == 512
    assert least_recent_window(rank, 257, 256) is None or rank[256:513].max() < BLOCKED
    assert least_recent_window(rank, 300, 256) == 256
    assert least_recent_window(rank, 600, 256) is None


@pytest.mark.parametrize("seed", range(20))
def test_room_agrees_with_the_plain_search(seed):
    rng = np.random.default_rng(seed)
    rank = rng.choice([0, 1, 2, 3, BLOCKED], p=[0.4, 0.25, 0.2, 0.145, 0.005], size=rng.integers(500, 900))
    length = int(rng.integers(1, 120))
    starts = [s for s in range(0, rank.size, 32) if s + length <= rank.size]
    best = min((int(rank[s : s + length].max()), -s) for s in starts)
    expected = None if best[0] == BLOCKED else -best[1]
    assert least_recent_window(rank.astype(np.int64), length, 32) == expected


def test_a_part_and_what_it_leaves_are_both_worth_an_extent():
    segment = Segment((1,), 1000, 99)
    assert segment.part(1200, 100) == segment.part(1000, 100) == 1000
    assert segment.part(950, 100) == 900
    assert segment.part(600, 100) == 600
    assert (segment.part(250, 100), segment.part(249, 100)) == (250, 0)
    assert (segment.part(350, 300), segment.part(299, 300)) == (350, 0)
    short = Segment((1,), 120, 99)
    assert (short.part(120, 100), short.part(119, 100)) == (120, 0)
    for tokens in range(1, 300):
        for room in range(0, 320, 7):
            part = Segment((1,), tokens, 9).part(room, 64)
            assert part in (0, tokens) or (64 <= part <= room and tokens - part >= 64 and 4 * part >= tokens)
            assert part == 0 or part <= room
