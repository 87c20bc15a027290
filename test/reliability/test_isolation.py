"""Equal text under two tenants never shares a slot, an extent or a group, whatever one of them spells."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

from granikv_sglang.plugin.front import Front
from granikv_sglang.plugin.namespaces import salted, spell
from reliability.conftest import words

PREFIX = words(301, 140)
LORA = "9f3c0a77d1e24b5c8a6b2f10e4d7c931"
"""An adapter's id, as SGLang makes them: 32 hexadecimal digits."""


def slots_of(driver, requests):
    s = driver.scheduler
    rows = driver.tree.req_to_token_pool.req_to_token
    live = {r.rid: r for r in s.running_batch.reqs}
    return [set(rows[live[r.rid].req_pool_idx, : len(PREFIX)].tolist()) for r in requests]


def assert_apart(driver, one: dict, other: dict) -> None:
    """Two requests of each namespace with equal text, live together: nothing is shared across, all is shared within."""
    pairs = [[driver.request([*PREFIX, 401 + i], 40, **who) for i in range(2)] for who in (one, other)]
    for pair in pairs:
        driver.turn(*pair)
        driver.turns_until(lambda p=pair: all(driver.reqs[r.rid].output_ids for r in p))
    for _ in range(4):
        driver.turn()
    ours, theirs = (slots_of(driver, pair) for pair in pairs)
    assert ours[0] == ours[1]
    assert theirs[0] == theirs[1]
    assert not ours[0] & theirs[0]
    spans = [{driver.tree.hot_path(driver.reqs[r.rid].last_node)[0] for r in pair} for pair in pairs]
    assert len(spans[0]) == len(spans[1]) == 1
    assert spans[0] != spans[1]
    assert driver.reqs[pairs[1][0].rid].cached_tokens == 0
    driver.settle()
    outputs = [driver.output(r) for pair in pairs for r in pair]
    assert outputs[:2] == outputs[2:]


def assert_together(driver, one: dict, other: dict) -> None:
    first, second = (driver.request([*PREFIX, 401], 2, **who) for who in (one, other))
    driver.answer(first)
    driver.answer(second)
    assert driver.reqs[second.rid].cached_tokens == len(PREFIX)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"extra_key": "a"}, {"extra_key": "b"}, id="two keys"),
        pytest.param({}, {"extra_key": "b"}, id="no key and a key"),
        pytest.param({}, {"extra_key": ""}, id="no key and the empty key"),
        pytest.param({"lora_id": LORA}, {"lora_id": LORA[::-1]}, id="two adapters"),
        pytest.param({"lora_id": LORA}, {}, id="adapter and base model"),
        pytest.param({"lora_id": LORA}, {"extra_key": LORA}, id="ATTACK: a key that spells an adapter"),
        pytest.param({"lora_id": LORA}, {"extra_key": "l" + LORA}, id="ATTACK: a key that spells our own spelling"),
        pytest.param(
            {"extra_key": "acme", "lora_id": LORA}, {"extra_key": "acme" + LORA}, id="ATTACK: key and adapter in one"
        ),
        pytest.param(
            {"extra_key": "acme", "lora_id": LORA},
            {"extra_key": "acme" + LORA[:5], "lora_id": LORA[5:]},
            id="ATTACK: the border moved",
        ),
        pytest.param(
            {"extra_key": "acme", "lora_id": LORA}, {"extra_key": f"b4:acme{LORA}"}, id="ATTACK: our spelling of both"
        ),
        pytest.param({"extra_key": "acme"}, {"extra_key": "k4:acme"}, id="ATTACK: our spelling of a key"),
    ],
)
def test_two_namespaces_share_nothing(driver, one, other):
    assert_apart(driver, one, other)


@pytest.mark.parametrize("who", [{}, {"extra_key": "a"}, {"lora_id": LORA}, {"extra_key": "a", "lora_id": LORA}])
def test_one_namespace_shares(driver, who):
    assert_together(driver, who, who)


def test_no_two_pairs_are_spelled_alike():
    """All pairs over strings made to be confused, digits and marks included."""
    parts = ["".join(p) for n in range(4) for p in itertools.product("k1:l", repeat=n)]
    pairs = [(key, lora) for key in [None, *parts] for lora in [None, "l", "1", "k1:", "l1"]]
    spelled = [(spell(key, lora) or "") + (lora or "") if (key, lora) != (None, None) else None for key, lora in pairs]
    assert len(set(spelled)) == len(pairs)


def compute(front: Front, salt, key):
    request = SimpleNamespace(cache_salt=salt, extra_key=key)
    original = getattr(OpenAIServingBase._compute_extra_key, "__wrapped__", OpenAIServingBase._compute_extra_key)
    return front.around_extra_key(original, None, request)


def test_no_two_salts_are_spelled_alike():
    front = Front()
    parts = [None, *("".join(p) for n in range(1, 4) for p in itertools.product("a1:", repeat=n))]
    spelled = {compute(front, salt, key) for salt in parts for key in parts}
    assert len(spelled) == len(parts) ** 2
    assert compute(front, None, None) is None
    assert compute(front, None, "raw") == "raw"


def test_a_salt_cannot_be_spelled_by_who_does_not_know_the_server():
    """What a client can know of the spelling is its form, not the server's secret, which is another in each server."""
    victim = compute(Front(), "acme", None)
    assert victim != compute(Front(), "acme", None)
    assert compute(Front(), None, victim.split(":", 1)[1]) != victim
    assert salted("s", "ac", "me") != salted("s", "acme", "")


@pytest.mark.parametrize("bad", [["a", "b"], 7, {"a": 1}])
def test_a_salt_that_is_no_string_is_refused_as_before(bad):
    with pytest.raises(TypeError, match="must be a string"):
        compute(Front(), bad, None)
