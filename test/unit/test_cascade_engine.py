"""The cascade engine with a stand-in for FlashInfer that keeps its contract: buffers, sizes and what a graph freezes.

The kernels around it run in Triton's interpreter. ``test/kernels/test_engines_gpu.py`` tests the real FlashInfer.
"""

import numpy as np
import pytest
import torch

from granikv_sglang.backends import DecodeBatch, Geometry, cascade
from granikv_sglang.core import Reason, Regime, Span
from granikv_sglang.plan import Decision, Plan, build_items, coverage_of

TEAM, ROLE, OTHER = (1, Span(256, 90)), (2, Span(515, 33)), (3, Span(700, 1))
SLOTS, CONTEXT, HEADS, KV_HEADS, DIM = 1200, 200, 6, 2, 16
GEOMETRY = Geometry(HEADS, KV_HEADS, DIM, torch.float32, torch.device("cpu"))


class Wrapper:
    """FlashInfer's paged prefill wrapper in graph mode, as far as its documentation promises things."""

    replaying = False

    def __init__(self, workspace, layout, *, use_cuda_graph, backend, qo_indptr_buf, paged_kv_indptr_buf,
                 paged_kv_indices_buf, paged_kv_last_page_len_buf):  # fmt: skip
        assert (layout, use_cuda_graph, backend) == ("NHD", True, "fa2")
        self.qo, self.kv, self.slots = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf
        self.requests = paged_kv_last_page_len_buf.shape[0]
        assert self.qo.shape == self.kv.shape == (self.requests + 1,)
        assert (paged_kv_last_page_len_buf == 1).all()
        self.workspace, self.most_rows, self.queries = None, 0, 0

    def workspace_size(self, *args, **kwargs):
        return 4000, 100

    def reset_workspace_buffer(self, floats, ints):
        assert floats.numel() >= 4000 and ints.numel() >= 100
        self.workspace = floats

    def plan(self, qo, kv, slots, page_lens, *heads, sm_scale, **types):
        assert heads == (HEADS, KV_HEADS, DIM, 1) and sm_scale == 1.0 and page_lens.shape == (self.requests,)
        self.most_rows = self.queries = int(qo[-1])
        self.qo.copy_(qo)
        self.kv.copy_(kv)

    def run(self, q, pages, *, q_scale, out, lse, return_lse):
        assert self.workspace is not None and return_lse and q.shape == out.shape and lse.shape == q.shape[:2]
        assert self.replaying or q.shape[0] == self.queries
        k_cache, v_cache = (x.squeeze(1).double().repeat_interleave(HEADS // KV_HEADS, 1) for x in pages)
        for i in range(self.requests):
            own, at = slice(int(self.qo[i]), int(self.qo[i + 1])), self.slots[self.kv[i] : self.kv[i + 1]].long()
            scores = torch.einsum("qhd,nhd->qhn", q[own].double(), k_cache[at]) * q_scale
            out[own] = torch.einsum("qhn,nhd->qhd", torch.softmax(scores, -1), v_cache[at]).to(out.dtype)
            lse[own] = (torch.logsumexp(scores, -1) / np.log(2.0)).float()


def fast_plan(wrapper, qo, kv, slots, page_lens, *heads, qo_indptr_host, kv_indptr_host, kv_lens_host, max_q_len,
              max_kv_len, **types):  # fmt: skip
    # The real one copies nothing that is its own buffer already: the caller has filled it, or it would be stale.
    assert qo is wrapper.qo and kv is wrapper.kv
    assert torch.equal(qo, qo_indptr_host) and torch.equal(kv, kv_indptr_host)
    assert torch.equal(kv_lens_host, kv_indptr_host.diff())
    assert (max_q_len, max_kv_len) == (int(qo_indptr_host.diff().max()), int(kv_lens_host.max()))
    wrapper.queries = int(qo_indptr_host[-1])
    assert wrapper.queries <= wrapper.most_rows and int(kv[-1]) <= wrapper.slots.shape[0]


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(cascade, "BatchPrefillWithPagedKVCacheWrapper", Wrapper)
    monkeypatch.setattr(cascade, "fast_prefill_plan", fast_plan)
    monkeypatch.setattr(Wrapper, "replaying", False)
    return cascade.CascadeSharedDecode(GEOMETRY, 64, SLOTS)


def plan_of(paths, version):
    items = build_items(paths)
    coverage = coverage_of(items, len(paths)).astype(np.int32)
    return Plan(Decision(Regime.CASCADE, Reason.FORCED), items, coverage, version)


def capture_plan(rows, version=-1):
    return Plan(Decision(Regime.CASCADE, Reason.FORCED), (), np.zeros(rows, np.int32), version)


class World:
    """Random caches and the slots of each row; rows past the paths are padding, one token on slot 0."""

    def __init__(self, paths, tails, rows, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.k, self.v = (torch.randn(SLOTS, KV_HEADS, DIM, generator=gen) for _ in range(2))
        self.q = torch.randn(rows, HEADS, DIM, generator=gen)
        self.table = torch.zeros(rows + 1, CONTEXT, dtype=torch.int32)
        self.rows = []
        at = 720
        for i, (path, tail) in enumerate(zip(paths, tails, strict=True)):
            slots = [s for _, span in path for s in range(span.start, span.stop)] + list(range(at, at + tail))
            at += tail
            self.rows.append(slots)
            self.table[i + 1, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
        padding = rows - len(paths)
        lens = torch.tensor([len(slots) for slots in self.rows] + [1] * padding)
        index = torch.tensor([*range(1, len(paths) + 1), *[0] * padding])
        self.batch = DecodeBatch(self.table, index, lens, lens.clone())

    def check(self, out):
        for i, slots in enumerate(self.rows):
            k, v = (x[slots].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (self.k, self.v))
            weights = torch.softmax(torch.einsum("hd,nhd->hn", self.q[i].double(), k) * 0.3, -1)
            torch.testing.assert_close(out[i].double(), torch.einsum("hn,nhd->hd", weights, v), rtol=1e-5, atol=1e-6)


def attend(engine, plan, world):
    engine.prepare(plan, world.batch)
    engine.begin()
    return engine.run(world.q, world.k, world.v, 0.3)


CASES = [
    ([(TEAM,)] * 4, [1, 5, 17, 1]),
    ([(TEAM, ROLE), (TEAM, ROLE), (TEAM,), (), (OTHER,), (OTHER,)], [3, 1, 40, 9, 2, 2]),
    ([(TEAM,), (TEAM,)], [30, 1]),
]


@pytest.mark.parametrize(("paths", "tails"), CASES)
def test_a_pass_without_a_graph(engine, paths, tails):
    """Six rows use the pass for eight, the rest of it empty."""
    world = World(paths, tails, len(paths))
    world.check(attend(engine, plan_of(paths, 1), world))


def test_sizes_share_buffers_and_plan_anew_after_one_another(engine):
    """The same two plans in turn, of two sizes: what one leaves in the shared slot list is not the other's."""
    plans = [plan_of(paths, i + 1) for i, (paths, _) in enumerate(CASES)]
    worlds = [World(paths, tails, len(paths)) for paths, tails in CASES]
    for _ in range(2):
        for plan, world in zip(plans, worlds, strict=True):
            engine.scratch.poison()
            world.check(attend(engine, plan, world))


def test_longer_tails_under_one_plan(engine):
    paths, tails = CASES[0]
    plan, world = plan_of(paths, 1), World(paths, tails, 4)
    for drop in (3, 1, 0):
        shorter = World(paths, [max(1, tail - drop) for tail in tails], 4)
        shorter.check(attend(engine, plan, shorter))
    world.check(attend(engine, plan, world))


@pytest.mark.parametrize("rows", [6, 7])
def test_capture_small_and_replay_large(engine, monkeypatch, rows):
    """What a graph freezes are the tensors its launches were given: all pairs, all rows. Plans change under it."""
    world = World([], [], rows)
    engine.prepare(capture_plan(rows), world.batch)
    engine.begin()
    out = engine.run(world.q, world.k, world.v, 0.3)
    assert torch.isfinite(out).all()
    one = engine._passes[rows]
    monkeypatch.setattr(Wrapper, "replaying", True)
    for version, (paths, tails) in enumerate([CASES[2], CASES[1], CASES[0]], start=1):
        world = World(paths, tails, rows, seed=version)
        engine.scratch.poison()
        engine.prepare(plan_of(paths, version), world.batch)
        assert engine.current is one
        monkeypatch.setattr(one, "_pairs", one.limits.pairs)
        one.list_tails(world.batch)
        world.check(one.run(world.q, world.k, world.v, 0.3))


def test_a_size_with_a_graph_keeps_its_pass_and_others_get_a_power_of_two(engine):
    engine.prepare(capture_plan(6), World([], [], 6).batch)
    assert sorted(engine._passes) == [6]
    for rows, expected in [(6, [6]), (5, [6, 8]), (7, [6, 8]), (3, [4, 6, 8])]:
        paths = [(TEAM,)] * rows
        engine.prepare(plan_of(paths, rows), World(paths, [1] * rows, rows).batch)
        assert sorted(engine._passes) == expected


def test_the_largest_size_first_means_one_workspace(engine):
    engine.prepare(capture_plan(16), World([], [], 16).batch)
    held = engine.scratch.bytes
    for rows in (8, 4, 1):
        engine.prepare(capture_plan(rows, -rows), World([], [], rows).batch)
    assert engine.scratch.bytes == held
    passes = engine._passes
    assert len({p._prefix._wrapper.workspace.data_ptr() for p in passes.values()}) == 1


def test_the_prefix_is_planned_once_while_the_plan_stands(engine, monkeypatch):
    paths, tails = CASES[0]
    plan, world, planned = plan_of(paths, 1), World(paths, tails, 4), []
    monkeypatch.setattr(cascade.CascadePass, "plan_prefix", lambda self, *args: planned.append(args), raising=True)
    for _ in range(3):
        engine.prepare(plan, world.batch)
    engine.prepare(plan_of(paths, 2), world.batch)
    assert len(planned) == 2


def test_one_plan_with_and_without_padding(engine):
    """A batch may leave its padded graph and run eagerly while the plan stands: that is another pass, planned anew."""
    paths, tails = CASES[0]
    plan, padded, bare = plan_of(paths, 1), World(paths, tails, 6), World(paths, tails, 4)
    engine.prepare(capture_plan(6), padded.batch)
    for world in (padded, bare, padded):
        world.check(attend(engine, plan, world))
    assert sorted(engine._passes) == [4, 6]


@pytest.mark.parametrize(("paths", "tails"), CASES[:2])
def test_paged_items_are_read_by_slot_wherever_they_lie(engine, paths, tails):
    """HOT off: an item is token positions, and its slots are strewn over the pool."""
    paged = cascade.CascadeSharedDecode(GEOMETRY, 64, SLOTS, paged=True)
    world = World(paths, tails, len(paths))
    strewn = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(3)) + 1
    moved = {slot: int(strewn[slot - 1]) for slot in range(1, SLOTS)}
    world.rows = [[moved[slot] for slot in slots] for slots in world.rows]
    for i, slots in enumerate(world.rows):
        world.table[i + 1, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    positions = []
    for path in paths:
        at, spans = 0, []
        for node, span in path:
            spans.append((node, Span(at, span.length)))
            at += span.length
        positions.append(spans)
    plan = plan_of(positions, 1)
    assert plan.items
    world.check(attend(paged, plan, world))
    with pytest.raises(AssertionError):
        world.check(attend(engine, plan, world))
