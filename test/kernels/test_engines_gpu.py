"""Both GPU engines, driven as SGLang drives them: eager, in CUDA graphs that outlive plans, without a device wait."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from kernel_batches import Batch, assert_lse, exact, make_batch, rms_ratio

from granikv_kernels.record import DecodeCase
from granikv_sglang.backends import DecodeBatch, Geometry, SharedDecode, build_engine
from granikv_sglang.core import Reason, Regime
from granikv_sglang.plan import Decision, Item, Plan

pytestmark = pytest.mark.gpu

BOUND = {"triton": 8e-3, "cascade": 1e-2}
"""RMS of the error over RMS of the reference. The cascade's partial states are rounded to bfloat16 before the merge."""
LSE_BOUND = 2e-3
SLOTS, CONTEXT, MOST_ROWS = 60000, 9000, 64
ENGINES = ["triton", "cascade"]


def case(name: str, items: tuple[tuple[int, tuple[int, ...]], ...], tails: tuple[int, ...]) -> DecodeCase:
    return DecodeCase(name, 8, 2, 128, items, tails)


def groups(name: str, lengths: tuple[int, ...], members: int, tail: int) -> DecodeCase:
    items = tuple((n, tuple(range(i * members, (i + 1) * members))) for i, n in enumerate(lengths))
    return case(name, items, tuple(tail + 3 * i for i in range(len(lengths) * members)))


SMALL = case("small", ((70, (0, 1)),), (3, 7, 1))
FOREST = case("forest", ((203, (0, 1, 2, 3, 5)), (77, (1, 2)), (65, (4, 6))), (30, 23, 1, 65, 128, 1, 70, 300))
LARGE = groups("4 groups", (5000, 3001, 2047, 64), 4, 100)
ONE = case("one prefix", ((8000, tuple(range(16))),), tuple(range(1, 17)))
LONE = case("long tails", ((129, (0, 1)),), (6000, 1, 4000, 2))
WIDE = groups("2 groups of 20", (3000, 517), 20, 9)
MIXED = case("a large and a small group", ((2500, tuple(range(20))), (4700, (20, 21, 22))), tuple(range(1, 25)))
CASES = [SMALL, FOREST, LARGE, ONE, LONE, WIDE, MIXED]
"""With four query heads per KV head, groups of more than 16 take another variant of the Triton engine."""


def plan_of(batch: Batch, version: int) -> Plan:
    items = tuple(Item(start, n, tuple(rows), i) for i, (start, n, rows) in enumerate(batch.items))
    return Plan(Decision(Regime.CASCADE, Reason.FORCED), items, batch.coverage, version)


def capture_plan(rows: int, version: int, variant: str) -> Plan:
    return Plan(Decision(Regime.CASCADE, Reason.FORCED), (), np.zeros(rows, np.int32), version, variant)


def engine_of(name: str, q_heads: int = 8, kv_heads: int = 2, dim: int = 128) -> SharedDecode:
    geometry = Geometry(q_heads, kv_heads, dim, torch.bfloat16, torch.device("cuda"))
    return build_engine(name, geometry, MOST_ROWS, SLOTS)


def poison(engine: SharedDecode) -> None:
    for holder in [engine.scratch] if isinstance(engine, _cascade()) else engine._ops.values():
        holder.poison()


def natural_lse(engine: SharedDecode, rows: int) -> torch.Tensor:
    if isinstance(engine, _cascade()):
        return engine.lse[:rows] * math.log(2.0)
    return engine._op.lse[:rows]


def _cascade() -> type:
    from granikv_sglang.backends.cascade import CascadeSharedDecode  # noqa: PLC0415

    return CascadeSharedDecode


@dataclass
class Static:
    """Buffers of fixed address for ``rows`` rows, as a graph runner has; loaded with one batch after the other."""

    rows: int
    q: torch.Tensor = field(init=False)
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)
    batch: DecodeBatch = field(init=False)

    def __post_init__(self) -> None:
        self.q = torch.zeros((self.rows, 8, 128), dtype=torch.bfloat16, device="cuda")
        self.k, self.v = (torch.zeros((SLOTS, 2, 128), dtype=torch.bfloat16, device="cuda") for _ in range(2))
        ones = torch.ones(self.rows, dtype=torch.int64)
        self.batch = DecodeBatch(
            torch.zeros((MOST_ROWS + 4, CONTEXT), dtype=torch.int32, device="cuda"),
            torch.zeros(self.rows, dtype=torch.int64, device="cuda"),
            ones.cuda(),
            ones.pin_memory(),
        )

    def load(self, batch: Batch) -> None:
        """Rows past the batch are padding as SGLang pads: one token, request 0 of no one, slot 0."""
        n = batch.case.rows
        self.q.zero_()
        self.q[:n] = batch.q
        for mine, theirs in ((self.k, batch.k), (self.v, batch.v)):
            mine.fill_(float("nan"))
            mine[: theirs.shape[0]] = theirs
            mine[0] = 0.0
        table = self.batch.req_to_token
        table.zero_()
        table[1 : batch.req_to_token.shape[0] + 1, : batch.req_to_token.shape[1]] = batch.req_to_token
        self.batch.req_pool_indices.zero_()
        self.batch.req_pool_indices[:n] = batch.req_index + 1
        self.batch.seq_lens.fill_(1)
        self.batch.seq_lens[:n] = batch.seq_lens
        assert self.batch.seq_lens_cpu is not None
        self.batch.seq_lens_cpu.copy_(self.batch.seq_lens.cpu())


class Graph:
    """A pass of ``rows`` rows captured with an empty plan, each variant, as the runtime captures them."""

    def __init__(self, engine: SharedDecode, rows: int, version: int) -> None:
        self.engine, self.static = engine, Static(rows)
        self._graphs = {variant: self._capture(variant, version) for variant in engine.variants}

    def _capture(self, variant: str, version: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        self.engine.prepare(capture_plan(self.static.rows, version, variant), self.static.batch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._pass()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self._pass()
        return graph, out

    def _pass(self) -> torch.Tensor:
        static = self.static
        self.engine.begin()
        return self.engine.run(static.q, static.k, static.v, 128**-0.5)

    def check(self, name: str, batch: Batch, version: int) -> None:
        self.static.load(batch)
        poison(self.engine)
        plan = plan_of(batch, version)
        graph, out = self._graphs[self.engine.variant_of(plan)]
        out.fill_(float("nan"))
        self.engine.prepare(plan, self.static.batch)
        graph.replay()
        rows = batch.case.rows
        expected, lse = exact(batch)
        assert rms_ratio(out[:rows], expected) <= BOUND[name], batch.case.name
        assert_lse(natural_lse(self.engine, rows), lse, LSE_BOUND)
        assert torch.isfinite(out).all()  # padding too: nothing uninitialised is read


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever in torch waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("one", CASES, ids=lambda c: c.name)
def test_eager(name: str, one: DecodeCase) -> None:
    engine, batch = engine_of(name), make_batch(one, "cuda")
    for version in (1, 2):  # the second finds buffers and passes made, and NaN in them
        lens = batch.seq_lens.cpu()
        engine.prepare(plan_of(batch, version), DecodeBatch(batch.req_to_token, batch.req_index, batch.seq_lens, lens))
        if version == 2:
            poison(engine)
        engine.begin()
        out = engine.run(batch.q, batch.k, batch.v, batch.scale)
        expected, lse = exact(batch)
        assert rms_ratio(out, expected) <= BOUND[name]
        assert_lse(natural_lse(engine, one.rows), lse, LSE_BOUND)


@pytest.mark.parametrize("name", ENGINES)
def test_capture_small_replay_large(name: str) -> None:
    """More, longer and other groups under one graph, the workspace poisoned before each replay."""
    graph = Graph(engine_of(name), 16, -1)
    for version, one in enumerate([SMALL, LARGE, ONE, FOREST, LONE, SMALL, LARGE], start=1):
        graph.check(name, make_batch(one, "cuda", seed=version), version)


@pytest.mark.parametrize("name", ENGINES)
def test_graphs_of_several_sizes_do_not_disturb_each_other(name: str) -> None:
    engine = engine_of(name)
    graphs = [Graph(engine, rows, -rows) for rows in (64, 16, 8, 3)]
    order = [(0, LARGE), (3, SMALL), (0, WIDE), (1, ONE), (2, FOREST), (0, MIXED), (1, LARGE), (3, SMALL), (0, WIDE)]
    for version, (at, one) in enumerate(order):
        graphs[at].check(name, make_batch(one, "cuda", seed=version), version + 1)


@pytest.mark.parametrize("name", ENGINES)
def test_a_tail_grows_under_one_plan(name: str) -> None:
    """Decode steps of one batch: the plan stands, only lengths move."""
    graph, batch = Graph(engine_of(name), 16, -1), make_batch(LARGE, "cuda", seed=5)
    full = batch.seq_lens.clone()
    for missing in (40, 1, 0):
        batch.seq_lens = full - missing
        graph.check(name, batch, 1)


@pytest.mark.parametrize("name", ENGINES)
def test_preparing_does_not_wait_for_the_device(name: str) -> None:
    graph, batch = Graph(engine_of(name), 16, -1), make_batch(LARGE, "cuda")
    graph.static.load(batch)
    with no_waiting():
        for version in (1, 1, 2):
            graph.engine.prepare(plan_of(batch, version), graph.static.batch)


def test_cascade_with_head_size_64_and_gqa_3() -> None:
    """The embedded model's shapes: a FlashInfer module of its own, compiled unless its cache was carried."""
    one = DecodeCase("smollm2", 9, 3, 64, ((600, (0, 1, 2, 3)), (90, (1, 2))), (5, 40, 1, 20))
    engine, batch = engine_of("cascade", 9, 3, 64), make_batch(one, "cuda")
    engine.prepare(
        plan_of(batch, 1), DecodeBatch(batch.req_to_token, batch.req_index, batch.seq_lens, batch.seq_lens.cpu())
    )
    engine.begin()
    out = engine.run(batch.q, batch.k, batch.v, batch.scale)
    expected, lse = exact(batch)
    assert rms_ratio(out, expected) <= BOUND["cascade"]
    assert_lse(natural_lse(engine, 4), lse, LSE_BOUND)
