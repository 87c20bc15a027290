"""Faults of an engine at every point of a pass, eager and under graphs, with stand-ins for engine and stock backend."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from granikv_sglang.backends import SharedDecode
from granikv_sglang.backends.attention import GraniKVAttnBackend
from granikv_sglang.config import GraniKVConfig
from granikv_sglang.core import Breaker, Counters, Reason, Regime, Span
from granikv_sglang.plan import Classifier, Decision, Item, Kind, Machine, Plan, Planner, Shape
from granikv_sglang.plugin.runtime import Runtime
from granikv_sglang.plugin.variants import GraphVariants

PLAN = Plan(Decision(Regime.CASCADE, Reason.FORCED), (Item(256, 500, (0, 1), 1),), np.full(2, 500, np.int32), 3)
PLAN_SPAN = Span(256, 500)
LAYER = SimpleNamespace(tp_q_head_num=1, qk_head_dim=4, layer_id=0, scaling=1.0)


class Engine(SharedDecode):
    """Shared decode that answers 2 everywhere, or raises at one point."""

    graph_safe, capacity = True, None

    def __init__(self, broken=""):
        self.broken = broken

    def _at(self, point):
        if point == self.broken:
            raise RuntimeError(f"boom in {point}")

    def prepare(self, plan, batch):
        self._at("prepare")

    def begin(self):
        self._at("begin")

    def run(self, q, *_):
        self._at("run")
        return torch.full_like(q, 2.0)


class Stock:
    """Answers 1 everywhere."""

    def __init__(self):
        self.calls = []

    def init_forward_metadata(self, forward_batch):
        self.calls.append("metadata")

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self.calls.append("out_graph")

    def forward_decode(self, q, *_args, **_kwargs):
        self.calls.append("decode")
        return torch.ones(q.shape)


def batch():
    lens = torch.full((2,), 501)
    mode = SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False)
    return SimpleNamespace(
        forward_mode=mode, batch_size=2, num_padding=0, seq_lens=lens, seq_lens_cpu=lens,
        req_pool_indices=torch.arange(2), out_cache_loc=torch.arange(2),
    )  # fmt: skip


def backend_of(engine, told):
    pool = SimpleNamespace(
        set_kv_buffer=lambda *_: None,
        get_key_buffer=lambda _: torch.zeros(1),
        get_value_buffer=lambda _: torch.zeros(1),
    )
    rows = torch.zeros(4, 600, dtype=torch.int32)
    return GraniKVAttnBackend(
        Stock(), {Regime.CASCADE: engine}, None, lambda: PLAN, rows, pool, lambda *fault: told.append(fault)
    )


def decode(backend):
    q = torch.zeros(2, 4)
    return backend.forward_decode(q, q, q, LAYER, batch()).unique().tolist()


@pytest.mark.parametrize("point", ["prepare", "begin", "run"])
def test_a_fault_at_any_point_of_an_eager_pass_is_finished_by_the_stock_backend(point):
    told = []
    backend = backend_of(Engine(point), told)
    backend.init_forward_metadata(batch())
    assert [decode(backend) for _ in range(3)] == [[1.0]] * 3
    assert backend.stock.calls == ["metadata", "decode", "decode", "decode"]
    ((engine, error),) = told
    assert engine == "cascade"
    assert str(error) == f"boom in {point}"


def test_layers_before_the_fault_are_kept():
    told = []
    engine = Engine()
    backend = backend_of(engine, told)
    backend.init_forward_metadata(batch())
    assert decode(backend) == [2.0]
    engine.broken = "run"
    assert decode(backend) == [1.0]
    engine.broken = ""
    assert decode(backend) == [1.0], "the engine came back in the middle of a pass"
    backend.init_forward_metadata(batch())
    assert decode(backend) == [2.0]
    assert len(told) == 1


def test_a_fault_in_preparing_a_replay_sends_it_to_the_stock_graph():
    runtime = Runtime(GraniKVConfig())
    runtime._plan = PLAN
    backend = backend_of(Engine("prepare"), [])
    backend._on_fault = runtime._engine_fault
    backend.init_forward_metadata_out_graph(batch())
    assert backend.stock.calls == ["out_graph"]
    # SGLang asks for the graph's label after this: without a plan it is its own.
    runner = SimpleNamespace(attn_backend=backend)
    assert runtime.around_variant(lambda *_: None, runner, batch()) is None
    assert runtime.counters.engine_faults == 1


@pytest.mark.parametrize("point", ["prepare", "run"])
def test_during_capture_a_fault_is_not_hidden(point):
    told = []
    backend = backend_of(Engine(point), told)
    with pytest.raises(RuntimeError, match="boom"):
        backend.init_forward_metadata_out_graph(batch(), in_capture=True)
        decode(backend)
    assert told == []


def test_a_regime_whose_graph_cannot_be_captured_is_given_up_and_the_others_are_not():
    given_up, captured = [], []
    engines = {Regime.CASCADE: Engine(), Regime.BATCHED_GEMM: Engine()}
    variants = GraphVariants(engines, lambda: 0, lambda regime, error: given_up.append((regime, str(error))))

    def capture_one(label):
        if "cascade" in label:
            raise RuntimeError("no capture")
        captured.append(label)

    held = []
    for size in (2, 1):
        variants.capture(size, held.append, capture_one)
    assert given_up == [(Regime.CASCADE, "no capture")]
    assert captured == ["granikv-batched_gemm"] * 2
    assert held[-1] is None


def test_a_breaker_speaks_twice_and_opens_for_good(caplog):
    breaker = Breaker("regime cascade", "such passes run UNIFORM")
    with caplog.at_level(logging.ERROR):
        for number in range(5):
            assert breaker.off == (number >= 3)
            breaker.fault(RuntimeError("boom"))
    first, second = (record.getMessage() for record in caplog.records)
    assert "a fault in regime cascade (RuntimeError: boom); such passes run UNIFORM" in first
    assert "regime cascade is switched off (3 faults)" in second
    assert breaker.faults == 5


def test_a_regime_that_is_off_is_planned_uniform_and_ranks_still_see_one_decision():
    off, noted = set(), []
    planner = Planner(
        Classifier.of(Machine(Kind.CPU, 1), Regime.CASCADE),
        shape=Shape(6, 2, 32, 4, 2),
        counters=Counters(),
        usable=lambda engine: engine not in off,
        note=lambda what, *numbers: noted.append((what, *numbers)),
    )
    first = planner.decode("a", lambda: [((1, PLAN_SPAN),)] * 2, lambda: 4)
    assert first.shared
    off.add("cascade")
    planner.forget()
    second = planner.decode("a", lambda: [((1, PLAN_SPAN),)] * 2, lambda: 4)
    assert second.decision == Decision(Regime.UNIFORM, Reason.ENGINE_OFF)
    assert second.version > first.version
    # A fault is one rank's own affair: what is compared between ranks is what was decided.
    assert noted[0] == noted[1]
