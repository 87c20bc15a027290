"""Promotion while somebody else is busy with the same prefix; after it the next hit answers as a cold run."""

from __future__ import annotations

import random

import pytest

from granikv_sglang.core import Decline
from reliability.conftest import words
from support.inprocess import CHUNK, POOL

PREFIX = words(21, 180)
NEW = 30


def prompt(index: int) -> list[int]:
    return [*PREFIX, 401 + index, 7]


def two_ready(driver, new=NEW):
    """Two requests decoding on the prefix, which is not promoted before ``let_promote``."""
    driver.hold_promotions()
    pair = [driver.request(prompt(i), new) for i in range(2)]
    driver.turn(*pair)
    driver.turns_until(lambda: all(driver.reqs[r.rid].output_ids for r in pair))
    assert driver.tree.hot == {}
    return pair


def promote_now(driver, *inputs):
    """The next turn promotes; ``inputs`` arrive in that very turn."""
    driver.let_promote()
    before = driver.counters.promotions
    driver.turn(*inputs)
    assert driver.counters.promotions == before + 1


def next_hit_equals_cold(driver):
    driver.settle()
    again = driver.answer(*[driver.request(prompt(i), NEW) for i in (0, 1, 2)])
    assert again == [driver.cold(prompt(i), NEW) for i in (0, 1, 2)]


def finish(driver, *requests):
    driver.settle()
    got = [driver.output(r) for r in requests]
    assert got == [driver.cold(list(r.input_ids), r.sampling_params.max_new_tokens) for r in requests]


@pytest.mark.parametrize("aborted", [False, True])
def test_while_another_that_matched_it_waits(driver, aborted):
    """All places are taken, so it waits; it has matched the prefix at its old slots, and is aborted or not."""
    pair = two_ready(driver, new=60)
    others = [driver.request(words(130 + i, 12), 60) for i in range(20)]
    driver.turn(*others)
    waiting = driver.request(prompt(5), NEW)
    driver.turn(waiting)
    for _ in range(4):
        driver.turn()
    assert driver.reqs[waiting.rid] in driver.scheduler.waiting_queue
    assert all(driver.reqs[r.rid] in driver.scheduler.running_batch.reqs for r in pair)
    promote_now(driver, *([driver.abort(waiting)] if aborted else []))
    finish(driver, *pair, *([] if aborted else [waiting]))
    next_hit_equals_cold(driver)


@pytest.mark.parametrize("chunks", range(1, 5))
@pytest.mark.parametrize("aborted", [False, True])
def test_while_another_is_being_chunk_prefilled(driver, chunks, aborted):
    """At each chunk boundary, inside the prefix and behind it; aborted in the same turn or not."""
    pair = two_ready(driver, new=60)
    long = driver.request([*PREFIX[:100], *words(40, 3 * CHUNK)], NEW)
    driver.turn(long)
    for _ in range(chunks - 1):
        driver.turn()
    promote_now(driver, *([driver.abort(long)] if aborted else []))
    finish(driver, *pair, *([] if aborted else [long]))
    next_hit_equals_cold(driver)


@pytest.mark.parametrize("chunks", range(1, 4))
def test_while_another_computes_the_same_prefix_itself(driver, chunks):
    """It came before anything was cached, so its own copy of the prefix is a duplicate when that is cached."""
    driver.hold_promotions()
    twin_a, twin_b = driver.request(prompt(0), 60), driver.request(prompt(1), 60)
    driver.turn(twin_a, twin_b)
    for _ in range(chunks):
        driver.turn()
    driver.let_promote()
    finish(driver, twin_a, twin_b)
    next_hit_equals_cold(driver)


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_while_another_is_retracted(driver, monkeypatch, interval):
    """Retraction takes one of the pair in the turn of the promotion, and again and again after it."""
    pair = two_ready(driver, new=40)
    third = driver.request(prompt(3), 40)
    driver.turn(third)
    driver.turns_until(lambda: driver.reqs[third.rid].output_ids)
    monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT", True)
    monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT_INTERVAL", interval)
    promote_now(driver)
    for _ in range(6):
        driver.turn()
    monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT_INTERVAL", 4)
    finish(driver, *pair, third)
    assert sum(driver.reqs[r.rid].retraction_count for r in (*pair, third)) >= 1
    next_hit_equals_cold(driver)


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("turns_before", [0, 1])
def test_while_a_member_is_aborted(driver, who, turns_before):
    """In the turn of the promotion, or one turn before it, when its last pass is still in flight."""
    pair = two_ready(driver, new=60)
    third = driver.request(prompt(3), 60)
    driver.turn(third)
    driver.turns_until(lambda: driver.reqs[third.rid].output_ids)
    aborts = [driver.abort(pair[i]) for i in who]
    driver.let_promote()
    if turns_before:
        driver.hold_promotions()
        driver.turn(*aborts)
        driver.let_promote()
        driver.turn()
    else:
        driver.turn(*aborts)
    finish(driver, third, *[r for i, r in enumerate(pair) if i not in who])
    next_hit_equals_cold(driver)


def test_two_identical_prompts_together(driver):
    expected = driver.cold(prompt(0), NEW)
    twins = [driver.request(prompt(0), NEW) for _ in range(2)]
    assert driver.answer(*twins) == [expected, expected]
    assert driver.counters.promotions > 0
    more = [driver.request(prompt(0), NEW) for _ in range(5)]
    assert driver.answer(*more) == [expected] * 5


@pytest.mark.parametrize("at", [1, 63, 65, 100, 179])
def test_a_split_inside_the_extent_in_the_turn_of_its_promotion(driver, at):
    """A request that leaves the prefix in its middle arrives in the turn in which the prefix is promoted."""
    pair = two_ready(driver, new=40)
    leaver = driver.request([*PREFIX[:at], *words(50, 20)], NEW)
    splits = driver.counters.hot_splits
    promote_now(driver, leaver)
    driver.turn()
    assert driver.counters.hot_splits == splits + 1
    finish(driver, *pair, leaver)
    next_hit_equals_cold(driver)


@pytest.mark.parametrize("at", [1, 100, 179])
def test_a_split_before_the_promotion_is_promoted_whole(driver, at):
    pair = two_ready(driver, new=40)
    leaver = driver.request([*PREFIX[:at], *words(51, 20)], 2)
    driver.turn(leaver)
    driver.turns_until(lambda: driver.reqs[leaver.rid].finished())
    promote_now(driver)
    assert driver.tree.hot_tokens() >= len(PREFIX)
    finish(driver, *pair)
    next_hit_equals_cold(driver)


def test_demotion_under_pressure(driver):
    """Prompts that fill the pool take the prefix's slots back while others still arrive for it."""
    pair = [driver.request(prompt(i), 20) for i in range(2)]
    assert driver.answer(*pair) == [driver.cold(prompt(i), 20) for i in range(2)]
    rng = random.Random(3)
    expected = {i: driver.cold(prompt(i), NEW) for i in range(7)}
    assert driver.answer(*[driver.request(prompt(i), 20) for i in range(2)])
    before = driver.counters.hot_evictions
    for round_ in range(6):
        # Strangers alone first, more than the pool holds: nothing locks the prefix and it is the least recently used.
        driver.answer(*[driver.request(words(900 + 9 * round_ + i, 600), 2) for i in range(POOL // 600 + 1)])
        batch = [driver.request(words(100 + 7 * round_ + i, rng.randrange(300, 620)), 6) for i in range(4)]
        batch.insert(rng.randrange(5), driver.request(prompt(round_), NEW))
        batch.append(driver.request(prompt(round_ + 1), NEW))
        outputs = dict(zip([r.rid for r in batch], driver.answer(*batch), strict=True))
        for request in batch:
            if list(request.input_ids[: len(PREFIX)]) == PREFIX:
                assert outputs[request.rid] == expected[request.input_ids[len(PREFIX)] - 401]
    assert driver.counters.hot_evictions > before


def test_no_room_is_a_decline_and_nothing_else(driver):
    """The pool is held by running requests: no run is free and none may be evicted."""
    giant = driver.request(words(60, POOL - 500), 120)
    driver.turn(giant)
    driver.turns_until(lambda: driver.reqs[giant.rid].output_ids)
    driver.hold_promotions()
    before = driver.counters.declines[Decline.NO_ROOM]
    pair = [driver.request([*words(61, 300), i], 20) for i in range(2)]
    driver.turn(*pair)
    driver.turns_until(lambda: all(driver.reqs[r.rid].output_ids for r in pair))
    driver.let_promote()
    driver.turn()
    assert driver.counters.declines[Decline.NO_ROOM] == before + 1
    finish(driver, giant, *pair)


@pytest.mark.parametrize("meanwhile", ["nothing", "a chunk", "an abort", "a retraction"])
def test_in_parts_while_the_pool_is_tight(driver, monkeypatch, meanwhile):
    """About 500 slots are free in one run. They take the first part of a prefix of 900, its old slots take the second.

    Between the two the prefix is half HOT, in a node that was split for it.
    """
    long = words(62, 900)
    other = driver.request(words(63, 450), 100)
    driver.hold_promotions()
    driver.turn(other)
    driver.turns_until(lambda: driver.reqs[other.rid].output_ids)
    pair = [driver.request([*long, 401 + i], 60) for i in range(2)]
    driver.turn(*pair)
    driver.turns_until(lambda: all(driver.reqs[r.rid].output_ids for r in pair))
    driver.let_promote()
    before, parts = driver.counters.promotions, driver.counters.partial_promotions
    driver.turn()
    assert (driver.counters.promotions, driver.counters.partial_promotions) == (before + 1, parts + 1)
    assert 225 <= driver.tree.hot_tokens() < 900
    if meanwhile == "a retraction":
        monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT", True)
        monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT_INTERVAL", 2)
    third = driver.request([*long[:700], 7, 8, 9], 20)
    between = {"a chunk": [third], "an abort": [driver.abort(other)]}
    driver.turn(*between.get(meanwhile, []))
    driver.turns_until(lambda: driver.tree.hot_tokens() >= 700)
    monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT", False)
    assert driver.counters.promotions >= before + 2
    finish(driver, *pair, *([third] if meanwhile == "a chunk" else []), *([other] if meanwhile != "an abort" else []))


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError(), ValueError("a kernel's own error")])
def test_a_copy_that_fails_leaves_the_prefix_cold(driver, monkeypatch, error):
    """Out of memory, a launch that fails, whatever a kernel raises: the run goes back, all are served from COLD."""

    def fail(*_):
        raise error

    pair = two_ready(driver)
    monkeypatch.setattr(driver.runtime._promoter, "_copy", fail)
    before = driver.counters.declines[Decline.COPY_FAILED]
    driver.let_promote()
    driver.turn()
    assert driver.counters.declines[Decline.COPY_FAILED] == before + 1
    assert driver.tree.hot == {}
    finish(driver, *pair)
    monkeypatch.undo()
    next_hit_equals_cold(driver)
    assert driver.counters.promotions > 0


@pytest.mark.parametrize("seed", range(4))
def test_members_of_a_group_hold_identical_slots_under_random_finish_and_abort(driver, seed):
    """Driver.check and check_plan look at every group in every turn; here is what keeps them busy."""
    rng = random.Random(seed)
    prefixes = [words(70 + i, length) for i, length in enumerate((90, 140, 200))]
    before = driver.counters.shared_rows
    sent = []
    for _ in range(60):
        inputs = []
        for _ in range(rng.choice([0, 0, 1, 2])):
            tokens = rng.choice(prefixes)
            cut = rng.choice([len(tokens)] * 4 + [rng.randrange(20, len(tokens))])
            inputs.append(driver.request([*tokens[:cut], 401 + rng.randrange(50), *words(rng.randrange(99), 3)], 25))
        if sent and rng.random() < 0.3:
            inputs.append(driver.abort(rng.choice(sent)))
        sent += [r for r in inputs if type(r).__name__ == "TokenizedGenerateReqInput"]
        driver.turn(*inputs)
    driver.settle()
    assert driver.counters.shared_rows > before
    for request in rng.sample([r for r in sent if len(driver.reqs[r.rid].output_ids) == 25], 3):
        assert driver.output(request) == driver.cold(list(request.input_ids), 25)
