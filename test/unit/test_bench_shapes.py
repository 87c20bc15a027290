"""Multi-agent shapes: lengths are what they say, sharing is what the shape says, all of it seeded."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv_sglang.bench_serving.shapes import SHAPES, MultiAgent, build, lengths_of, members_of
from granikv_sglang.bench_serving.workload import FIRST_ID, Vocabulary
from granikv_sglang.core import GraniKVError


def asks_of(spec, repetition=0):
    (turn,) = build(spec, repetition).turns
    return turn({})


def shared(a, b):
    """Length of the common beginning of two prompts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def small(shape, **values):
    return MultiAgent(**{"shape": shape, "agents": 6, "prefix": 64, "private": 8, "output": 5, "role": 16, **values})


@pytest.mark.parametrize("shape", SHAPES)
def test_ids_are_seeded_and_private_parts_are_fresh(shape):
    spec = small(shape, groups=2 if shape in ("heterogeneous",) else None, roles=2)
    first, again, other = (build(spec, r).turns[0]({}) for r in (0, 0, 1))
    assert first == again
    assert {a.rid for a in first} == {a.rid for a in other}
    by_rid = {ask.rid: ask for ask in other}
    for ask in first:
        prefix = next((p for p in build(spec, 0).prefixes if ask.prompt[: len(p)] == p), ())
        # The next repetition shares the prefix with this one, and not one token more.
        assert shared(ask.prompt, by_rid[ask.rid].prompt) == len(prefix)
    assert build(spec, 0).prefixes == build(spec, 1).prefixes
    assert build(small(shape, seed=7, groups=spec.groups, roles=2), 0).turns[0]({}) != first
    assert all(FIRST_ID <= token < spec.vocab for ask in first for token in ask.prompt)
    assert all(ask.prompt_len == len(ask.prompt) and ask.output_len == 5 for ask in first)


def test_homogeneous_shares_exactly_one_prefix():
    asks = asks_of(small("homogeneous"))
    assert len(asks) == 6
    assert {ask.prompt_len for ask in asks} == {72}
    assert {shared(a.prompt, b.prompt) for a, b in combinations(asks, 2)} == {64}


def test_heterogeneous_has_distinct_prefixes_of_distinct_lengths():
    spec = small("heterogeneous", agents=16, prefix=16384, groups=8, private=4)
    work = build(spec, 0)
    # Even steps from a ratio of 8: the published 2K to 16K.
    assert [len(prefix) for prefix in work.prefixes] == [2048 * (i + 1) for i in range(8)]
    assert {shared(a, b) for a, b in combinations(work.prefixes, 2)} == {0}
    asks = work.turns[0]({})
    assert Counter(ask.group for ask in asks) == {f"team{i}": 2 for i in range(8)}
    for a, b in combinations(asks, 2):
        length = 2048 * (int(a.group.removeprefix("team")) + 1)
        assert shared(a.prompt, b.prompt) == (length if a.group == b.group else 0)
    # Groups come among each other.
    assert [ask.group for ask in asks] != sorted(ask.group for ask in asks)


def test_a_length_ratio_of_one_gives_equal_lengths():
    assert lengths_of(small("heterogeneous", length_ratio=1.0), 4) == [64] * 4


def test_zipf_makes_some_groups_popular_and_leaves_none_out():
    zipf = members_of(small("heterogeneous", agents=128, popularity="zipf", zipf_alpha=1.2), 8)
    even = members_of(small("heterogeneous", agents=128), 8)
    assert sum(zipf) == sum(even) == 128
    assert even == [16] * 8
    assert min(zipf) >= 1
    assert max(zipf) > 3 * sorted(zipf)[3]
    assert zipf != sorted(zipf, reverse=True)  # popularity does not follow length


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 12), st.integers(0, 200), st.sampled_from(["uniform", "zipf"]), st.floats(0.1, 3), st.integers(0, 9)
)
def test_members_always_add_up(groups, more, popularity, alpha, seed):
    spec = MultiAgent(agents=groups + more, popularity=popularity, zipf_alpha=alpha, seed=seed)
    members = members_of(spec, groups)
    assert sum(members) == spec.agents
    assert min(members) >= 1
    assert len(members) == groups
    if popularity == "uniform":
        assert max(members) - min(members) <= 1


def test_forest_shares_team_and_role():
    asks = asks_of(small("forest", agents=8, roles=2, groups=2))
    team, role = (lambda ask: ask.group.split(".")[0]), (lambda ask: ask.group)
    for a, b in combinations(asks, 2):
        wanted = 80 if role(a) == role(b) else 64 if team(a) == team(b) else 0
        assert shared(a.prompt, b.prompt) == wanted
    assert {ask.prompt_len for ask in asks} == {88}


def test_straggler_has_one_outsider_of_the_same_length():
    asks = asks_of(small("straggler"))
    (outsider,) = [ask for ask in asks if ask.group == "outsider"]
    others = [ask for ask in asks if ask is not outsider]
    assert outsider.prompt_len == others[0].prompt_len == 72
    assert {shared(outsider.prompt, other.prompt) for other in others} == {0}
    assert {shared(a.prompt, b.prompt) for a, b in combinations(others, 2)} == {64}


@pytest.mark.parametrize(("agents", "sizes"), [(2, [2]), (6, [2, 4]), (16, [2, 4, 2, 4, 2, 2]), (4, [2, 2])])
def test_fanout_is_groups_of_two_and_four(agents, sizes):
    asks = asks_of(small("fanout", agents=agents))
    counts = Counter(ask.group for ask in asks)
    assert [counts[f"fan{i}"] for i in range(len(sizes))] == sizes
    for a, b in combinations(asks, 2):
        assert shared(a.prompt, b.prompt) == (64 if a.group == b.group else 0)


def test_none_shares_nothing():
    asks = asks_of(small("none"))
    assert {shared(a.prompt, b.prompt) for a, b in combinations(asks, 2)} == {0}
    assert {ask.prompt_len for ask in asks} == {72}
    assert build(small("none"), 0).prefixes == ()


def test_rounds_agents_read_what_all_said():
    spec = small("rounds", agents=3, rounds=3)
    turns = build(spec, 0).turns
    assert len(turns) == 3
    answers, said = {}, ()
    for number, turn in enumerate(turns):
        asks = turn(answers)
        assert len({ask.rid for ask in asks} | set(answers)) == len(asks) * (number + 1)
        for ask in asks:
            assert ask.prompt[64 : 64 + len(said)] == said
            assert ask.prompt_len == 64 + len(said) + 8
        assert {shared(a.prompt, b.prompt) for a, b in combinations(asks, 2)} == {64 + len(said)}
        for agent, ask in enumerate(asks):
            answers[ask.rid] = tuple(range(100 * number + 10 * agent, 100 * number + 10 * agent + 5))
            said += answers[ask.rid]
    with pytest.raises(KeyError):
        turns[1]({})


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"shape": "blob"}, "--ma-shape"),
        ({"agents": 0}, "--ma-agents"),
        ({"prefix": 0}, "--ma-prefix-len"),
        ({"private": 0}, "--ma-private-len"),
        ({"output": 0}, "--ma-output-len"),
        ({"length_ratio": 0.5}, "--ma-length-ratio"),
        ({"length_ratio": float("nan")}, "--ma-length-ratio"),
        ({"popularity": "some"}, "--ma-popularity"),
        ({"zipf_alpha": 0.0}, "--ma-zipf-alpha"),
        ({"fanout": (1, 2)}, "--ma-fanout"),
        ({"shape": "fanout", "agents": 5}, "--ma-fanout"),
        ({"shape": "heterogeneous", "agents": 4}, "--ma-agents"),
        ({"shape": "heterogeneous", "agents": 8, "prefix": 4}, "--ma-length-ratio"),
        ({"shape": "straggler", "agents": 2}, "--ma-agents"),
        ({"vocab": 1000}, "--ma-vocab"),
        ({"shape": "none", "agents": 5000, "prefix": 1, "private": 1, "vocab": 4100}, "--ma-vocab"),
    ],
    ids=str,
)
def test_bad_values_name_the_flag(values, flag):
    with pytest.raises(GraniKVError, match=flag) as refused:
        build(MultiAgent(**values), 0)
    assert "\n" not in str(refused.value)


def test_stretches_and_private_parts_never_begin_alike():
    vocabulary = Vocabulary(5000)
    heads = {vocabulary.stretch(i, 3, "x")[0] for i in range(50)}
    privates = vocabulary.privates([3] * 500, "y")
    assert len(heads) == 50
    assert len({part[0] for part in privates}) == 500
    assert not heads & {part[0] for part in privates}
