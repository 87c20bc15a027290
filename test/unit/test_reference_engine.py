"""Both engines against plain softmax attention over each request's own tokens; Triton runs in its interpreter here."""

import pytest
import torch

from granikv_sglang.backends import ENGINES, DecodeBatch, Geometry, build_engine
from granikv_sglang.core import Reason, Regime, Span
from granikv_sglang.plan import Decision, Plan, build_items, coverage_of


def exact(q, k_cache, v_cache, slots, scale):
    """Attention of one row over its slots in float64."""
    gqa = q.shape[0] // k_cache.shape[1]
    k = k_cache[slots].double().repeat_interleave(gqa, dim=1)
    v = v_cache[slots].double().repeat_interleave(gqa, dim=1)
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q.double(), k) * scale, dim=-1)
    return torch.einsum("hn,nhd->hd", weights, v)


def world(paths, tails, heads=6, kv_heads=2, dim=16, seed=0):
    """Random caches in which every slot nobody owns is NaN, and each row's token map."""
    torch.manual_seed(seed)
    owned = sorted({s for path in paths for _, span in path for s in range(span.start, span.stop)})
    first_tail = (max(owned) if owned else 0) + 7
    slots = first_tail + sum(tails) + 5
    k_cache = torch.full((slots, kv_heads, dim), float("nan"))
    v_cache = torch.full((slots, kv_heads, dim), float("nan"))
    rows, at = [], first_tail
    for path, tail in zip(paths, tails, strict=True):
        prefix = [s for _, span in path for s in range(span.start, span.stop)]
        rows.append(prefix + list(range(at, at + tail)))
        at += tail
    used = torch.tensor(sorted({s for row in rows for s in row}))
    k_cache[used], v_cache[used] = torch.randn(len(used), kv_heads, dim), torch.randn(len(used), kv_heads, dim)
    req_to_token = torch.zeros((len(rows) + 2, 400), dtype=torch.int32)
    for i, row in enumerate(rows):
        req_to_token[i + 1, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return torch.randn(len(rows), heads, dim), k_cache, v_cache, rows, req_to_token


def engine_of(name, q, k_cache):
    geometry = Geometry(q.shape[1], k_cache.shape[1], q.shape[2], q.dtype, q.device)
    return build_engine(name, geometry, max_rows=8)


def attend(engine, plan, batch, q, k_cache, v_cache, scale):
    """One pass, as the attention backend drives it."""
    engine.prepare(plan, batch)
    engine.begin()
    return engine.run(q, k_cache, v_cache, scale)


TEAM, ROLE, OTHER = (1, Span(256, 90)), (2, Span(515, 33)), (3, Span(700, 1))


@pytest.mark.parametrize(
    ("paths", "tails"),
    [
        ([(TEAM,)] * 4, [1, 5, 17, 1]),
        ([(TEAM, ROLE), (TEAM, ROLE), (TEAM,), ()], [3, 1, 40, 9]),
        ([(OTHER,), (TEAM,), (OTHER,), (TEAM,), ()], [1, 1, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize("heads", [2, 6, 8])
@pytest.mark.parametrize("name", ENGINES)
def test_matches_plain_attention(name, paths, tails, heads):
    q, k_cache, v_cache, rows, req_to_token = world(paths, tails, heads=heads)
    items = build_items(paths)
    plan = Plan(Decision(Regime.CASCADE, Reason.FORCED), items, coverage_of(items, len(paths)), version=1)
    lens = torch.tensor([len(row) for row in rows])
    batch = DecodeBatch(req_to_token, torch.arange(len(rows)) + 1, lens, lens)
    out = attend(engine_of(name, q, k_cache), plan, batch, q, k_cache, v_cache, 0.25)
    for i, row in enumerate(rows):
        torch.testing.assert_close(out[i].double(), exact(q[i], k_cache, v_cache, row, 0.25), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ENGINES)
def test_the_next_step_of_the_same_plan_sees_longer_tails(name):
    paths, tails = [(TEAM,)] * 3, [4, 2, 8]
    q, k_cache, v_cache, rows, req_to_token = world(paths, tails)
    items = build_items(paths)
    plan = Plan(Decision(Regime.CASCADE, Reason.FORCED), items, coverage_of(items, 3), version=5)
    engine = engine_of(name, q, k_cache)
    for drop in (1, 0):
        lens = torch.tensor([len(row) - drop for row in rows])
        batch = DecodeBatch(req_to_token, torch.arange(3) + 1, lens, lens)
        out = attend(engine, plan, batch, q, k_cache, v_cache, 0.3)
        for i, row in enumerate(rows):
            expected = exact(q[i], k_cache, v_cache, row[: len(row) - drop], 0.3)
            torch.testing.assert_close(out[i].double(), expected, rtol=1e-5, atol=1e-6)


def test_padded_rows_are_harmless():
    """A graph is replayed for a padded batch: rows past the plan have one token and no coverage."""
    paths, tails = [(TEAM,)] * 3, [4, 2, 8]
    q, k_cache, v_cache, rows, req_to_token = world(paths, tails)
    items = build_items(paths)
    plan = Plan(Decision(Regime.CASCADE, Reason.FORCED), items, coverage_of(items, 3), version=5)
    lens = torch.tensor([*(len(row) for row in rows), 1, 1])
    batch = DecodeBatch(req_to_token, torch.tensor([1, 2, 3, 0, 0]), lens, lens)
    padded = torch.cat([q, torch.randn(2, *q.shape[1:])])
    out = attend(engine_of("triton", q, k_cache), plan, batch, padded, k_cache, v_cache, 0.3)
    for i, row in enumerate(rows):
        torch.testing.assert_close(out[i].double(), exact(q[i], k_cache, v_cache, row, 0.3), rtol=1e-5, atol=1e-6)


def test_an_unknown_engine_is_an_error():
    with pytest.raises(KeyError):
        build_engine("fast")
