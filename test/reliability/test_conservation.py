"""No slot is lost or owned twice, whatever happens to the requests: SGLang's loop, audited in every turn."""

from __future__ import annotations

import pytest

from reliability.conftest import words
from support.inprocess import CHUNK, POOL
from support.tiny import tiny_model

PREFIX = words(1, 150)


def prompt(index: int, prefix=PREFIX) -> list[int]:
    return [*prefix, 401 + index, 5]


def shared(driver, count=3, new=40):
    """Requests under one HOT prefix, decoding."""
    requests = [driver.request(prompt(i), new) for i in range(count)]
    driver.turn(*requests)
    driver.turns_until(lambda: driver.tree.hot and all(driver.reqs[r.rid].output_ids for r in requests))
    return requests


def hit_equals_cold(driver, index=0, new=12):
    """The next requests on the prefix, alone and together, answer as on an empty cache."""
    expected = [driver.cold(prompt(i), new) for i in (index, index + 1)]
    together = [driver.request(prompt(i), new) for i in (index, index + 1)]
    assert driver.answer(*together) == expected
    assert driver.answer(driver.request(prompt(index), new)) == expected[:1]


@pytest.mark.parametrize("boundary", range(9))
def test_abort_at_each_chunk_boundary_of_a_chunked_prefill(driver, boundary):
    expected = [driver.cold(prompt(i), 30) for i in range(2)]
    living = [driver.request(prompt(i), 30) for i in range(2)]
    driver.turn(*living)
    driver.turn()
    long = driver.request([*PREFIX, *words(7, 4 * CHUNK + 9)], 4)
    driver.turn(long)
    for _ in range(boundary):
        driver.turn()
    driver.turn(driver.abort(long))
    driver.settle()
    assert [driver.output(r) for r in living] == expected
    req = driver.reqs[long.rid]
    assert req.req_pool_idx is None
    # What the aborted request has left in the tree is right.
    whole = [*PREFIX, *words(7, 4 * CHUNK + 9)]
    (after_abort,) = driver.answer(driver.request(whole, 6))
    assert after_abort == driver.cold(whole, 6)


def test_the_chunk_boundaries_above_are_real(driver):
    """The prompt of the test above takes several turns to prefill, and is a chunked request in between."""
    long = driver.request([*PREFIX, *words(7, 4 * CHUNK + 9)], 4)
    driver.turn(long)
    chunked = 0
    while not driver.reqs[long.rid].output_ids:
        chunked += driver.scheduler.chunked_req is not None
        driver.turn()
    assert chunked >= 4


@pytest.mark.parametrize("after", [0, 1, 2, 5, 11])
def test_clients_that_disconnect_in_the_middle(driver, after):
    """A disconnect reaches the scheduler as an abort: of one member, of all but one, of all."""
    expected = driver.cold(prompt(2), 40)
    requests = shared(driver, 3, 40)
    for _ in range(after):
        driver.turn()
    driver.turn(*[driver.abort(r) for r in requests[:2]])
    driver.turn()
    driver.settle()
    assert driver.output(requests[2]) == expected
    requests = shared(driver, 3, 40)
    driver.turn(*[driver.abort(r) for r in requests])
    driver.settle()
    hit_equals_cold(driver)


def test_retraction_and_resume(driver, monkeypatch):
    """Members of a HOT group are retracted in turn, come back, match again, and answer as if nothing had been."""
    expected = [driver.cold(prompt(i), 50) for i in range(4)]
    monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT", True)
    monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT_INTERVAL", 5)
    requests = [driver.request(prompt(i), 50) for i in range(4)]
    assert driver.answer(*requests) == expected
    assert sum(driver.reqs[r.rid].retraction_count for r in requests) >= 4


def test_retraction_because_the_pool_is_full(driver):
    """Not a test switch: decode itself runs out of slots, with HOT in the pool."""
    expected = [driver.cold(prompt(i), 260) for i in range(3)]
    requests = [driver.request(prompt(i), 260) for i in range(8)]
    assert 8 * 262 + len(PREFIX) > POOL
    driver.turn(*requests)
    while not driver.scheduler.is_fully_idle():
        # SGLang reserves for a share of the tokens that may still come; with none reserved, decode must retract.
        driver.scheduler.new_token_ratio_tracker.current = 0.0
        driver.turn()
    outputs = [driver.output(r) for r in requests]
    assert outputs[:3] == expected
    assert sum(driver.reqs[r.rid].retraction_count for r in requests) >= 1


def test_a_request_that_alone_fills_the_pool(driver):
    """It pushes every prefix out, HOT ones too; another one behind it waits and is served."""
    shared(driver)
    driver.settle()
    assert driver.tree.hot
    evicted = driver.counters.hot_evictions
    whole = words(9, POOL - 40)
    giants = [driver.request(whole, 30), driver.request([*words(11, POOL - 60)], 30)]
    outputs = driver.answer(*giants)
    assert driver.counters.hot_evictions > evicted
    assert outputs[0] == driver.cold(whole, 30)
    hit_equals_cold(driver)


def test_a_request_that_can_never_fit_is_refused(driver):
    too_long = driver.request(words(9, POOL + 100), 4)
    driver.turn(too_long)
    driver.settle()
    assert driver.reqs[too_long.rid].finished_reason.to_json()["type"] == "abort"
    hit_equals_cold(driver)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_resume(driver, mode):
    expected = [driver.cold(prompt(i), 40) for i in range(3)]
    requests = shared(driver, 3, 40)
    driver.control("PauseGenerationReqInput", mode=mode)
    for _ in range(3):
        driver.turn()
    late = driver.request(prompt(3), 8)
    driver.turn(late, driver.abort(requests[0]))
    assert not driver.flush(), "flushed under requests that are paused"
    driver.control("ContinueGenerationReqInput", torch_empty_cache=False)
    driver.settle()
    assert [driver.output(r) for r in requests[1:]] == expected[1:]
    assert driver.output(late) == driver.cold(prompt(3), 8)


def test_flush_is_refused_while_requests_run(driver):
    expected = [driver.cold(prompt(i), 40) for i in range(3)]
    requests = shared(driver, 3, 40)
    hot = dict(driver.tree.hot)
    for _ in range(4):
        assert not driver.flush()
    assert driver.tree.hot == hot
    driver.settle()
    assert [driver.output(r) for r in requests] == expected
    assert driver.flush()
    assert driver.tree.hot == {}


def test_flush_that_waits_for_idle(driver):
    requests = shared(driver, 3, 20)
    driver.turn(driver.message("FlushCacheReqInput", timeout_s=60.0))
    assert driver.tree.hot
    driver.settle()
    driver.turn()
    assert driver.tree.hot == {}
    assert all(driver.reqs[r.rid].finished() for r in requests)


def test_release_and_resume_of_memory(driver):
    expected = [driver.cold(prompt(i), 20) for i in range(3)]
    requests = shared(driver, 3, 20)
    driver.settle()
    driver.control("ReleaseMemoryOccupationReqInput", tags=["kv_cache"])
    assert driver.tree.hot == {}
    # Whatever the pool holds now is not KV of anything.
    pool = driver.tree.allocator.get_kvcache()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(float("nan"))
    driver.control("ResumeMemoryOccupationReqInput", tags=["kv_cache"])
    again = [driver.request(prompt(i), 20) for i in range(3)]
    outputs = driver.answer(*again)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.nan_to_num_()
    assert outputs == expected == [driver.output(r) for r in requests]


def load(driver, model):
    reply = driver.control("UpdateWeightFromDiskReqInput", model_path=str(model), load_format="auto")
    assert reply.success, reply.message
    driver.expected.clear()


def test_a_weight_update_from_disk_forgets_every_prefix(driver, tiny, tmp_path):
    old = [driver.cold(prompt(i), 20) for i in range(2)]
    shared(driver, 3, 20)
    driver.settle()
    assert driver.tree.hot
    load(driver, tiny_model(tmp_path, seed=5))
    try:
        assert driver.tree.hot == {}
        new = [driver.cold(prompt(i), 20) for i in range(2)]
        assert new != old
        requests = shared(driver, 3, 20)
        driver.settle()
        assert [driver.output(r) for r in requests[:2]] == new
    finally:
        load(driver, tiny)
    assert [driver.cold(prompt(i), 20) for i in range(2)] == old


def test_the_answers_depend_on_every_slot(driver):
    """One wrong K vector deep in the prefix changes the answer: equal answers above are worth something."""
    expected = driver.cold(prompt(0), 30)
    shared(driver)
    driver.settle()
    slot = next(iter(driver.tree.hot.values())).start + 70
    pool = driver.tree.allocator.get_kvcache()
    kept = [b[slot].clone() for b in (*pool.k_buffer, *pool.v_buffer)]
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[slot] = buffer[slot - 1]
    assert driver.answer(driver.request(prompt(0), 30)) != [expected]
    for buffer, value in zip((*pool.k_buffer, *pool.v_buffer), kept, strict=True):
        buffer[slot] = value
