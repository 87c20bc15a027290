"""Prefill over HOT prefixes against plain causal attention of each request over its own tokens."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv_sglang.backends import ExtendBatch, Geometry, build_extend
from granikv_sglang.backends.extend_flashinfer import TILES
from granikv_sglang.core import Counters, Reason, Regime, Span
from granikv_sglang.plan import (
    Classifier,
    Decision,
    Kind,
    Machine,
    Plan,
    Planner,
    Shape,
    build_items,
    cold_part,
    coverage_of,
    levels_of,
    query_tiles,
    token_offsets,
)

TEAM, ROLE, OTHER, BELOW = (1, Span(512, 390)), (2, Span(256, 33)), (3, Span(1024, 1)), (4, Span(289, 5))
LONG, DEEP = (5, Span(1792, 768)), (6, Span(2565, 800))


def plan_of(paths, min_item_tokens=1):
    items = build_items(paths, min_item_tokens, min_members=1)
    return Plan(Decision(Regime.CASCADE, Reason.HOT_PREFILL), items, coverage_of(items, len(paths)), version=1)


def world(paths, cold, new, heads, kv_heads, dim, device, dtype):
    """Caches in which every slot nobody owns is NaN, each row's tokens, and the new tokens' q, k and v, cut out of one
    tensor as a model's are."""
    generator = torch.Generator().manual_seed(sum(new) + heads)
    lens = [sum(span.length for _, span in path) for path in paths]
    first = 3400
    slots_total = first + sum(cold) + sum(new) + 3
    rows, at = [], first
    for path, rest, tokens in zip(paths, cold, new, strict=True):
        hot = [s for _, span in path for s in range(span.start, span.stop)]
        rows.append(hot + list(range(at, at + rest + tokens)))
        at += rest + tokens
    total = sum(new)
    qkv = torch.randn(total, heads + 2 * kv_heads, dim, generator=generator).to(device, dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    caches = [torch.full((slots_total, kv_heads, dim), float("nan")) for _ in range(2)]
    cached = sorted({s for row, tokens in zip(rows, new, strict=True) for s in row[: len(row) - tokens]})
    for cache in caches:
        cache[cached] = torch.randn(len(cached), kv_heads, dim, generator=generator)
    for cache, fresh in zip(caches, (k, v), strict=True):
        # What the pass itself has written.
        written = [s for row, tokens in zip(rows, new, strict=True) for s in row[len(row) - tokens :]]
        cache[written] = fresh.float().cpu()
    table = torch.zeros((len(rows) + 1, 2400), dtype=torch.int32)
    for i, row in enumerate(rows):
        table[i + 1, : len(row)] = torch.tensor(row, dtype=torch.int32)
    prefix = [length + rest for length, rest in zip(lens, cold, strict=True)]
    batch = ExtendBatch(table.to(device), torch.arange(1, len(rows) + 1, device=device), prefix, list(new))
    tensors = [q, k, v, *(cache.to(device, dtype) for cache in caches)]
    return batch, tensors, rows


def exact(tensors, batch, rows, scale):
    q, k, v, k_cache, v_cache = (x.double().cpu() for x in tensors)
    gqa, out, at = q.shape[1] // k.shape[1], [], 0
    for row, tokens, prefix in zip(rows, batch.extend_lens, batch.prefix_lens, strict=True):
        keys = torch.cat((k_cache[row[:prefix]], k[at : at + tokens])).repeat_interleave(gqa, 1)
        values = torch.cat((v_cache[row[:prefix]], v[at : at + tokens])).repeat_interleave(gqa, 1)
        scores = torch.einsum("qhd,khd->hqk", q[at : at + tokens], keys) * scale
        late = torch.arange(prefix + tokens).unsqueeze(0) > prefix + torch.arange(tokens).unsqueeze(1)
        weights = torch.softmax(scores.masked_fill(late, float("-inf")), -1)
        out.append(torch.einsum("hqk,khd->qhd", weights, values))
        at += tokens
    return torch.cat(out)


ENGINES = [("torch", "cpu", torch.float32), pytest.param(("flashinfer", "cuda", torch.bfloat16), marks=pytest.mark.gpu)]


@pytest.fixture(params=ENGINES, ids=lambda p: p[0])
def engine_kind(request):
    if request.param[1] == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


CASES = [
    ([(TEAM,)] * 3, [0, 0, 0], [5, 1, 17]),
    ([(TEAM, ROLE), (), (TEAM, ROLE), (TEAM,), (OTHER,)], [3, 4, 0, 40, 0], [3, 1, 40, 9, 130]),
    ([(OTHER,), (TEAM, ROLE, BELOW), (TEAM,), (OTHER,)], [1, 0, 0, 6], [1, 1, 1, 1]),
    ([(ROLE,)], [0], [2]),
    ([(LONG, DEEP), (LONG,), (TEAM,), (LONG, DEEP)], [0, 3, 1, 0], [200, 3, 70, 33]),
    ([(LONG, DEEP), (LONG,), (), (LONG,)], [0, 3, 8, 0], [300, 3, 20, 257]),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (6, 6, 64), (9, 3, 64)])
def test_matches_plain_attention(engine_kind, case, heads, kv_heads, dim):
    name, device, dtype = engine_kind
    paths, cold, new = case
    batch, tensors, rows = world(paths, cold, new, heads, kv_heads, dim, device, dtype)
    engine = build_extend(name, Geometry(heads, kv_heads, dim, dtype, torch.device(device)))
    engine.prepare(plan_of(paths), batch)
    scale = 0.2
    for _ in range(2):  # two layers of one pass
        out = engine.run(*tensors, scale).double().cpu()
    wanted = exact(tensors, batch, rows, scale)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    assert ((out - wanted).pow(2).mean() / wanted.pow(2).mean()).sqrt() < tolerance


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_padded_pass_and_a_pass_after_another_on_the_gpu():
    """Graph runners pad a prefill; and an engine is planned again and again."""
    geometry = Geometry(8, 2, 128, torch.bfloat16, torch.device("cuda"))
    engine = build_extend("flashinfer", geometry)
    for paths, cold, new in CASES:
        batch, tensors, rows = world(paths, cold, new, 8, 2, 128, "cuda", torch.bfloat16)
        engine.prepare(plan_of(paths), batch)
        wanted = exact(tensors, batch, rows, 0.1)
        padded = [torch.cat((x, torch.full_like(x[:1], float("nan")).expand(5, -1, -1))) for x in tensors[:3]]
        out = engine.run(*padded, *tensors[3:], 0.1).double().cpu()
        assert out.shape[0] == sum(new) + 5
        assert ((out[: sum(new)] - wanted).pow(2).mean() / wanted.pow(2).mean()).sqrt() < 8e-3


def test_dense_reads_are_multiples_of_flashinfers_tile():
    """As its header has them: a FlashInfer with other tiles must not go unnoticed."""
    flashinfer = importlib.util.find_spec("flashinfer").submodule_search_locations[0]
    header = Path(flashinfer, "data/include/flashinfer/attention/hopper/prefill_sm90.cuh").read_text()
    same = header[header.index("getCTATileSize() {") :]
    same = same[: same.index("static_assert(HEAD_DIM_QK == 192")]
    tiles = [tuple(map(int, pair)) for pair in re.findall(r"make_tuple\((\d+), (\d+)\)", same)]
    assert re.findall(r"HEAD_DIM_QK == (\d+)\)", same) == ["64", "128"]
    assert tiles == [(192, TILES[64]), (128, 128), (128, TILES[128]), (128, TILES[256])]  # (128, 128) is the causal one
    assert all(384 % tile == 0 for tile in TILES.values())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_levels_and_cold_part_cover_every_cached_token_once(data):
    """Whatever forest: a new token reads each cached position of its request exactly once, in one level or COLD."""
    spans = {n: Span(100 * n, data.draw(st.integers(1, 60))) for n in range(1, 8)}
    parent = {n: data.draw(st.sampled_from([0, *range(1, n)])) for n in spans}

    def path_of(node):
        return () if node == 0 else (*path_of(parent[node]), (node, spans[node]))

    rows = data.draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 20), st.integers(1, 9)), min_size=1))
    paths = [path_of(node) for node, _, _ in rows]
    items = build_items(paths, data.draw(st.integers(1, 40)), min_members=1)
    granule = data.draw(st.sampled_from([1, 2, 7, 16]))
    prefix = [sum(s.length for _, s in path) + rest for path, (_, rest, _) in zip(paths, rows, strict=True)]
    offsets = token_offsets([new for _, _, new in rows])
    seen = [[] for _ in range(offsets[-1])]
    for level in levels_of(items, offsets, granule):
        assert (np.diff(level.qo_indptr) >= 0).all()
        assert (np.diff(level.kv_indptr) >= 0).all()
        for s in range(len(level.qo_indptr) - 1):
            for token in level.tokens[level.qo_indptr[s] : level.qo_indptr[s + 1]]:
                seen[token] += range(level.kv_indptr[s], level.kv_indptr[s + 1])
        lens = np.diff(level.kv_indptr)[np.diff(level.qo_indptr) > 0]
        assert (lens % granule == 0).all()
    cold = cold_part(items, prefix, granule)
    for row, path in enumerate(paths):
        # A position is named by its slot where it is HOT, else by its negative.
        hot = [slot for _, span in path for slot in range(span.start, span.stop)]
        names = hot + [-p for p in range(len(hot), prefix[row])]
        mine = slice(cold.kv_indptr[row], cold.kv_indptr[row + 1])
        assert (cold.rows[mine] == row).all()
        for token in range(offsets[row], offsets[row + 1]):
            assert sorted(seen[token] + [names[p] for p in cold.positions[mine]]) == sorted(names)


def test_a_run_of_tokens_needs_no_gather():
    items = build_items([(TEAM,), (), (TEAM,), (TEAM,)], min_members=1)
    assert levels_of(items[:1], token_offsets([2, 0, 3, 1]))[0].run_of(6) == slice(0, 6)
    assert levels_of(items[:1], token_offsets([2, 1, 3, 1]))[0].run_of(7) is None


def test_a_level_out_of_order_is_cut_into_runs_where_few_will_do():
    """Stretches lie in the arena as they were promoted, requests in the batch as they came."""
    spans = [(n, Span(1000 * n, 100)) for n in range(8)]

    def starts(order, sizes):
        items = build_items([(spans[n],) for n in order for _ in range(2)], min_members=1)
        total = int(token_offsets(sizes)[-1])
        parts = levels_of(items, token_offsets(sizes))
        runs = [part.run_of(total) for part in parts]
        assert all(run is None for run in runs) or (len(runs) > 1 and None not in runs)
        return [run.start for run in runs if run is not None]

    assert starts([4, 5, 1, 2], [3] * 8) == [0, 12]
    assert starts([3, 2, 1, 0], [3] * 8) == [0, 6, 12, 18]
    assert starts([4, 3, 2, 1, 0], [3] * 10) == []  # five launches would cost more than gathering does


def test_the_planner_takes_a_prefill_where_it_pays_and_says_why():
    def planner(kind, forced=None):
        return Planner(
            Classifier.of(Machine(kind, 132 if kind is Kind.CUDA else 1), forced),
            shape=Shape(32, 8, 128), counters=Counters(),
        )  # fmt: skip

    long = (9, Span(0, 4096))
    assert query_tiles(build_items([(long,)], min_members=1), [129], 32) == 64
    on_gpu = planner(Kind.CUDA)
    assert on_gpu.prefill([()], [500]).decision.reason is Reason.NOT_DECODE
    assert on_gpu.prefill([(long,)], [128]).decision.reason is Reason.TOO_SMALL
    taken = on_gpu.prefill([(long,), (long,), ()], [300, 200, 9])
    assert taken.decision == Decision(Regime.CASCADE, Reason.HOT_PREFILL)
    assert taken.coverage.tolist() == [4096, 4096, 0]
    assert planner(Kind.CPU).prefill([(long,)], [1]).shared
    assert not planner(Kind.CPU, Regime.UNIFORM).prefill([(long,)], [1]).shared
