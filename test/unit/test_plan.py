"""Forest, groups, classifier and the per-step cache: plain values, no torch."""

import random

import pytest

from granikv_sglang.core import Counters, Reason, Regime, Span
from granikv_sglang.plan import (
    Capacity,
    Classifier,
    Decision,
    Kind,
    Limits,
    Machine,
    Planner,
    Shape,
    analytic,
    build_items,
    coverage_of,
)
from granikv_sglang.plan.forest import within

TEAM, ROLE_A, ROLE_B = (1, Span(1024, 500)), (2, Span(2048, 100)), (3, Span(2560, 80))
SHAPE = Shape(q_heads=6, kv_heads=2, head_dim=1, element=2, layers=2)  # 8 bytes a token and layer
EAGER = Classifier(analytic(Machine(Kind.CUDA, 132)), Regime.CASCADE, Limits(min_item_tokens=1, min_prefill_tiles=1))


def test_two_levels_make_a_forest_and_cover_a_leading_span():
    paths = [(TEAM, ROLE_A), (TEAM, ROLE_A), (TEAM, ROLE_B), (TEAM,), ()]
    items = build_items(paths)
    assert [(i.start, i.tokens, i.rows) for i in items] == [(1024, 500, (0, 1, 2, 3)), (2048, 100, (0, 1))]
    assert coverage_of(items, 5).tolist() == [600, 600, 500, 500, 0]


def test_several_roots_are_several_groups():
    other = (9, Span(5120, 300))
    items = build_items([(TEAM,), (other,), (TEAM,), (other,)])
    assert [(i.node_id, i.rows) for i in items] == [(1, (0, 2)), (9, (1, 3))]


def test_adjoining_nodes_with_the_same_members_are_one_item():
    upper, lower = (1, Span(1024, 200)), (2, Span(1224, 300))
    items = build_items([(upper, lower), (upper, lower)])
    assert [(i.start, i.tokens, i.rows) for i in items] == [(1024, 500, (0, 1))]
    apart = build_items([(upper, (2, Span(2048, 300)))] * 2)
    assert len(apart) == 2
    fewer = build_items([(upper, lower), (upper, lower), (upper,)])
    assert [(i.tokens, i.rows) for i in fewer] == [(200, (0, 1, 2)), (300, (0, 1))]


def test_a_prefix_with_one_member_in_the_batch_is_no_item():
    assert build_items([(TEAM,), ()]) == ()
    assert build_items([]) == ()


def test_short_items_go_only_where_nothing_hangs_below_them():
    short, long = (1, Span(1024, 10)), (2, Span(2048, 400))
    assert build_items([(short,), (short,)], min_item_tokens=16) == ()
    kept = build_items([(short, long), (short, long), (short,)], min_item_tokens=16)
    assert [(i.tokens, i.rows) for i in kept] == [(10, (0, 1)), (400, (0, 1))]
    assert coverage_of(kept, 3).tolist() == [410, 410, 0]


def test_a_short_beginning_joins_what_adjoins_it():
    # What a chat template's first tokens look like: A was promoted with them, B later and elsewhere.
    first, role, a, b = (1, Span(1024, 1)), (2, Span(1025, 2)), (3, Span(1027, 400)), (4, Span(4096, 300))
    paths = [(first, role, a)] * 3 + [(first, role, b)] * 2 + [(first,)] * 2
    items = build_items(paths, min_item_tokens=16)
    assert [(i.start, i.tokens, i.rows) for i in items] == [
        (1024, 3, (3, 4)),
        (1024, 403, (0, 1, 2)),
        (4096, 300, (3, 4)),
    ]
    assert coverage_of(items, 7).tolist() == [403, 403, 403, 303, 303, 0, 0]


def random_paths(rng: random.Random) -> list[list[tuple[int, Span]]]:
    """Root paths of 40 rows in a random tree of 29 nodes."""
    tree: dict[int, tuple[int, ...]] = {0: ()}
    spans = {}
    for node_id in range(1, 30):
        tree[node_id] = (*tree[rng.randrange(node_id)], node_id)
        above = spans.get(tree[node_id][-2]) if len(tree[node_id]) > 1 else None
        # Some adjoin the node above, as after a split or a promotion of both; only one below a node can.
        adjoins = above is not None and above.stop not in {span.start for span in spans.values()} and rng.random() < 0.6
        start = above.stop if adjoins and above is not None else node_id * 1000 + rng.randrange(3)
        spans[node_id] = Span(start, rng.randint(1, 90))
    return [[(n, spans[n]) for n in tree[rng.randrange(30)]] for _ in range(40)]


def assert_leading(items, paths):
    """The items of each row are a leading span of its path."""
    coverage = coverage_of(items, len(paths))
    for row, path in enumerate(paths):
        slots = [s for _, span in path for s in range(span.start, span.stop)]
        mine = [s for item in items if row in item.rows for s in range(item.start, item.start + item.tokens)]
        assert mine == slots[: coverage[row]]


@pytest.mark.parametrize("seed", range(30))
def test_random_forests_keep_coverage_leading_and_members_identical(seed):
    rng = random.Random(seed)
    paths = random_paths(rng)
    assert_leading(build_items(paths, min_item_tokens=rng.choice([1, 20, 60])), paths)


@pytest.mark.parametrize("seed", range(30))
def test_a_forest_too_large_for_the_buffers_loses_the_least_it_can_at_the_end(seed):
    rng = random.Random(seed)
    paths = random_paths(rng)
    items = build_items(paths, min_item_tokens=rng.choice([1, 20, 60]))
    pairs = sum(len(item.rows) for item in items)
    for capacity in (Capacity(64, rng.randrange(len(items)), 10**6), Capacity(64, 10**6, rng.randrange(pairs))):

        def holds(some, capacity=capacity):
            return capacity.holds(40, some)

        kept = within(items, holds)
        assert holds(kept) and not holds(items)
        assert [item for item in items if item in kept] == list(kept)
        assert_leading(kept, paths)
        # One step earlier it did not fit: of what had no item below, the one that saves least went last.
        gone = [item for item in items if item not in kept]
        back = [[i for i in items if i in kept or i is one] for one in gone]
        assert any(not holds(some) for some in back)
    assert within(items, lambda some: len(some) == 0) == ()
    assert within(items, lambda some: True) == items


def test_what_saves_most_stays_whatever_its_depth():
    deep, wide = ((1, Span(1000, 10)), (2, Span(3000, 900))), ((3, Span(9000, 300)),)
    items = build_items([deep] * 3 + [wide] * 2)
    assert [item.node_id for item in within(items, lambda some: len(some) <= 2)] == [1, 2]
    assert [item.node_id for item in within(items, lambda some: len(some) <= 1)] == [1]


def test_a_batch_whose_forest_does_not_fit_shares_what_does():
    """Six levels in a full batch, buffers for four items a row: not the end of sharing."""
    levels = tuple((level, Span(10000 * level, 1000 - level)) for level in range(1, 7))
    capacities = {Regime.CASCADE: Capacity(rows=8, items=8, pairs=32)}
    planner = Planner(EAGER, shape=SHAPE, counters=Counters(), capacities=capacities)
    plan = planner.decode("a", lambda: [levels] * 8, lambda: 8 * 6100)
    assert plan.decision.regime is Regime.CASCADE
    assert [item.node_id for item in plan.items] == [1, 2, 3, 4]
    assert plan.coverage.tolist() == [999 + 998 + 997 + 996] * 8
    too_many = planner.decode("b", lambda: [levels] * 9, lambda: 9 * 6100)
    assert too_many.decision == Decision(Regime.UNIFORM, Reason.OVER_CAPACITY)


def test_planner_reuses_the_plan_while_the_key_stands_and_counts_every_pass():
    counters = Counters()
    planner = Planner(EAGER, shape=SHAPE, counters=counters)
    paths = [(TEAM,), (TEAM,), ()]
    calls = []

    def look():
        calls.append(1)
        return paths

    first = planner.decode("a", look, lambda: 1510)
    assert planner.decode("a", look, lambda: 1510) is first
    second = planner.decode("b", look, lambda: 1510)
    assert second.version > first.version
    assert len(calls) == 2
    assert (counters.plans_built, counters.plans_reused) == (2, 1)
    assert counters.bytes_not_reread == 3 * 500 * 8 * 2
    assert counters.shared_rows == 6
    assert planner.other(4).rows == 4
    report = counters.as_dict()
    assert report["shared_steps"] == 3
    assert report["steps"]["uniform"] == {"not_decode": 1}


def test_a_uniform_plan_has_no_items_and_no_coverage():
    planner = Planner(Classifier.of(Machine(Kind.CUDA, 132)), shape=SHAPE, counters=Counters())
    plan = planner.decode("a", lambda: [(TEAM,), (TEAM,)], lambda: 1100)
    assert (plan.decision.regime, plan.decision.reason) == (Regime.UNIFORM, Reason.TOO_SMALL)
    assert plan.items == ()
    assert plan.coverage.tolist() == [0, 0]


def test_sharing_by_batch_reads_only_what_every_request_has_in_common():
    """What collapses when prompts are heterogeneous: the peer that multi-group sharing is measured against."""
    planner = Planner(EAGER, shape=SHAPE, counters=Counters(), whole_batch=True)
    everyone = planner.decode("a", lambda: [(TEAM, ROLE_A), (TEAM, ROLE_A), (TEAM, ROLE_B)], lambda: 2000)
    assert [(item.tokens, item.rows) for item in everyone.items] == [(500, (0, 1, 2))]
    assert everyone.coverage.tolist() == [500, 500, 500]
    outsider = planner.decode("b", lambda: [(TEAM,), (TEAM,), ()], lambda: 1100)
    assert outsider.decision == Decision(Regime.UNIFORM, Reason.NOTHING_SHARED)
    alone = planner.decode("c", lambda: [(TEAM,)], lambda: 501)
    assert alone.decision == Decision(Regime.UNIFORM, Reason.NOTHING_SHARED)
