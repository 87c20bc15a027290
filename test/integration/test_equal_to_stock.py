"""Greedy tokens equal to stock SGLang under everything that can move or take away a slot."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from granikv_sglang.demo.teams import TEAMS
from support.load import Request, compare, generate, run

NEW_TOKENS = 16


@pytest.fixture(scope="module")
def text(model) -> list[int]:
    """Real token ids of the repository's own texts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [token for team in TEAMS for token in tokenizer(team.prefix)["input_ids"]]


def requests_of(text: list[int]) -> list[Request]:
    """Three groups of 16 and two outsiders: each group has members on its prefix, on an extension of it (two levels),
    and on its first half only (which splits it)."""
    rng = random.Random(11)
    at = iter(range(0, 10**6, 37))
    made = []
    for group, (start, length) in {"a": (0, 150), "b": (500, 190), "c": (1000, 170)}.items():
        prefix = text[start : start + length]
        extension = text[start + length : start + length + 50]
        for i in range(16):
            question = text[2000 + next(at) % 900 :][: rng.randint(5, 20)]
            body = prefix[: length // 2] if i in (6, 13) else prefix + (extension if i % 4 == 3 else [])
            made.append(Request(f"{group}{i}", group, (*body, 100 + i, *question), NEW_TOKENS))
    made += [Request(f"out{i}", "none", tuple(text[1500 + 40 * i :][:60]), NEW_TOKENS) for i in range(2)]
    # Groups overlap in time but do not all run at once, so that a group's prefix can become evictable.
    return sorted(made, key=lambda r: ("abc".find(r.group) * 9 + rng.random() * 18, r.rid))


@pytest.fixture(scope="module")
def replies(granikv, stock, text):
    requests = requests_of(text)
    aborts = [
        Request(f"abort{i}", "abort", (*text[start : start + length], 7, i), 300)
        for i, (start, length) in enumerate([(0, 150), (500, 190), (1000, 170), (1000, 220), (300, 120)])
    ]
    ours = run(granikv, requests, gap=0.25, aborts=aborts)
    return ours, run(stock, requests)


def test_greedy_tokens_equal_stock(replies, record_property, capsys):
    ours, stock = replies
    assert len(ours) == 50
    result = compare(ours, stock)
    record_property("ties", len(result.ties))
    with capsys.disabled():
        print(f"\n{result.equal} of {len(ours)} requests equal token for token, {len(result.ties)} ties in float noise")
    assert result.wrong == ()
    assert result.equal >= 45


def test_everything_meant_to_happen_happened(replies, granikv, text):
    """The run above is worth something only if prefixes were promoted, extended and split, and requests retracted."""
    counters = granikv.granikv_state()["counters"]
    assert counters["promotions"] >= 3
    assert counters["extended_promotions"] >= 1
    assert counters["hot_splits"] >= 1
    assert counters["shared_steps"] > 20
    assert counters["bytes_not_reread"] > 0
    assert counters["audits"] > 50
    assert granikv.log.read_text(errors="replace").count("Testing retraction") >= 3


def test_eviction_takes_hot_prefixes_and_the_next_hit_equals_a_cold_run(replies, granikv, stock, text):
    """Unrelated prompts push every prefix out of the small pool; the same requests then answer as before."""
    before = granikv.granikv_state()["counters"]["hot_evictions"]
    flood = [Request(f"flood{i}", "none", tuple(text[3 + 31 * i :][:500]), 2) for i in range(5)]
    run(granikv, flood)
    assert granikv.granikv_state()["counters"]["hot_evictions"] > before
    again = [r for r in requests_of(text) if r.group == "a"][:6]
    result = compare(run(granikv, again), {r.rid: replies[1][r.rid] for r in again})
    assert result.wrong == ()


def test_equal_text_under_another_extra_key_is_not_shared(granikv, text):
    ids = tuple(text[700:900])
    first = generate(granikv, Request("k1", "k", ids, 2, extra_key="tenant-a"))
    same = generate(granikv, Request("k2", "k", ids, 2, extra_key="tenant-a"))
    other = generate(granikv, Request("k3", "k", ids, 2, extra_key="tenant-b"))
    assert first.token_ids == same.token_ids == other.token_ids
    assert same.cached > 0
    assert other.cached == 0
