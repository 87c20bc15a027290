"""Which engine does which regime, and the graphs captured for them: labels, cost, one line of log."""

import dataclasses
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from granikv_sglang.backends import Geometry, SharedDecode, TorchSharedDecode
from granikv_sglang.backends.attention import GraniKVAttnBackend
from granikv_sglang.backends.cascade_plan import CascadeCapacity
from granikv_sglang.config import REGIMES, GraniKVConfig
from granikv_sglang.core import Counters, GraniKVError, Reason, Regime, Span
from granikv_sglang.plan import (
    Capacity,
    Classifier,
    Decision,
    Item,
    Kind,
    Machine,
    Plan,
    Planner,
    Shape,
    analytic,
    uniform_plan,
)
from granikv_sglang.plan.table import Calibration
from granikv_sglang.plugin.engines import capacities_of, classifier_of, decode_engines, engine_names
from granikv_sglang.plugin.runtime import Runtime
from granikv_sglang.plugin.variants import GraphVariants, label_of

BF16 = Geometry(32, 8, 128, torch.bfloat16, torch.device("cpu"))
CUDA, CPU = (Calibration(analytic(m), "analytic", "") for m in (Machine(Kind.CUDA, 132), Machine(Kind.CPU, 1)))
FLOAT32 = Geometry(9, 3, 64, torch.float32, torch.device("cpu"))
ITEM = Item(256, 500, (0, 1), 1)


class Engine(SharedDecode):
    """Records what it is asked. With two variants it takes the second for plans of one item."""

    def __init__(self, graph_safe=True, capacity=None, variants=("",)):
        self.graph_safe, self.capacity, self.variants, self.calls = graph_safe, capacity, variants, []

    def variant_of(self, plan):
        return self.variants[-1] if len(plan.items) == 1 else ""

    def prepare(self, plan, batch):
        self.calls.append(("prepare", plan.decision.regime, batch.seq_lens.shape[0]))

    def begin(self):
        self.calls.append("begin")

    def run(self, q, k_cache, v_cache, sm_scale):
        self.calls.append("run")
        return q


class Stock:
    """A stock backend of which only the calls matter."""

    def __init__(self):
        self.calls = []

    def init_forward_metadata(self, forward_batch):
        self.calls.append("metadata")

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self.calls.append("out_graph")

    def init_forward_metadata_in_graph(self, forward_batch):
        self.calls.append("in_graph")


class Mode:
    def is_decode(self):
        return True

    def is_extend(self):
        return False


def plan_of(regime, rows=2):
    if regime is Regime.UNIFORM:
        return uniform_plan(rows, Reason.NOTHING_SHARED)
    return Plan(Decision(regime, Reason.FORCED), (ITEM,), np.full(rows, 500, np.int32), 3)


def batch_of(rows, padding=0):
    lens = torch.full((rows,), 501)
    return SimpleNamespace(
        forward_mode=Mode(), batch_size=rows, num_padding=padding, seq_lens=lens, seq_lens_cpu=lens,
        req_pool_indices=torch.arange(rows),
    )  # fmt: skip


def backend_of(engines):
    held = []
    backend = GraniKVAttnBackend(
        Stock(), engines, None, lambda: held[-1] if held else None, torch.zeros(4, 600, dtype=torch.int32), None
    )
    return backend, held


def test_each_regime_goes_to_its_own_engine_and_uniform_to_none():
    engines = {Regime.CASCADE: Engine(), Regime.BATCHED_GEMM: Engine()}
    backend, held = backend_of(engines)
    for regime in (Regime.CASCADE, Regime.UNIFORM, Regime.BATCHED_GEMM, Regime.CASCADE):
        held.append(plan_of(regime))
        backend.init_forward_metadata(batch_of(2))
    assert [call[1] for call in engines[Regime.CASCADE].calls if call != "begin"] == [Regime.CASCADE] * 2
    assert [call[1] for call in engines[Regime.BATCHED_GEMM].calls if call != "begin"] == [Regime.BATCHED_GEMM]
    assert backend.stock.calls == ["metadata"]


@pytest.mark.parametrize("regime", [Regime.CASCADE, Regime.BATCHED_GEMM])
def test_in_a_graph_preparation_and_recorded_work_go_to_the_same_engine(regime):
    engines = {Regime.CASCADE: Engine(), Regime.BATCHED_GEMM: Engine()}
    backend, held = backend_of(engines)
    held.append(plan_of(regime))
    backend.init_forward_metadata_out_graph(batch_of(3, padding=1))
    backend.init_forward_metadata_in_graph(batch_of(3, padding=1))
    other = engines.pop(regime)
    assert other.calls == [("prepare", regime, 3), "begin"]
    assert next(iter(engines.values())).calls == [] and backend.stock.calls == []
    held.append(plan_of(Regime.UNIFORM))
    backend.init_forward_metadata_out_graph(batch_of(3, padding=1))
    backend.init_forward_metadata_in_graph(batch_of(3, padding=1))
    assert backend.stock.calls == ["out_graph", "in_graph"]


@pytest.mark.parametrize(
    ("regime", "expected"),
    [
        ("uniform", ()),
        ("cascade", (Regime.CASCADE,)),
        ("batched_gemm", (Regime.BATCHED_GEMM,)),
        ("auto", (Regime.BATCHED_GEMM,)),
    ],
)
def test_engines_and_graphs_on_a_gpu_are_those_the_classifier_can_choose(regime, expected):
    assert regime in REGIMES
    assert classifier_of(regime, CUDA).regimes() == expected


def test_on_a_cpu_one_torch_engine_does_every_regime():
    runner = SimpleNamespace(token_to_kv_pool=SimpleNamespace(k_buffer=[torch.zeros(8, 2, 16)]))
    engines = decode_engines(runner, classifier_of("auto", CPU))
    assert set(engines) == {Regime.CASCADE, Regime.BATCHED_GEMM}
    assert len({id(engine) for engine in engines.values()}) == 1
    assert all(isinstance(engine, TorchSharedDecode) for engine in engines.values())
    assert decode_engines(runner, classifier_of("uniform", CPU)) == {}


def test_a_classifier_that_uses_both_regimes_gets_both():
    both = Classifier(dataclasses.replace(CUDA.constants, regimes=(Regime.CASCADE, Regime.BATCHED_GEMM)))
    assert set(both.regimes()) == {Regime.CASCADE, Regime.BATCHED_GEMM}
    assert engine_names(both.regimes(), BF16, None) == {Regime.CASCADE: "cascade", Regime.BATCHED_GEMM: "triton"}
    # Without kernels for the model the Triton engine does both.
    assert set(engine_names(both.regimes(), FLOAT32, None).values()) == {"triton"}


def test_a_forced_cascade_without_kernels_is_refused_in_one_line():
    assert engine_names((Regime.CASCADE,), BF16, Regime.CASCADE) == {Regime.CASCADE: "cascade"}
    with pytest.raises(GraniKVError, match=r"--granikv-regime cascade: .*float32.*64.*--dtype bfloat16") as caught:
        engine_names((Regime.CASCADE,), FLOAT32, Regime.CASCADE)
    assert "\n" not in str(caught.value)


def test_a_plan_that_one_engine_cannot_hold_is_left_to_the_others():
    wide, narrow = Capacity(1024, 1024, 4096), CascadeCapacity.of(1024)
    engines = {Regime.CASCADE: Engine(capacity=narrow), Regime.BATCHED_GEMM: Engine(capacity=wide)}
    both = dataclasses.replace(CUDA.constants, regimes=(Regime.CASCADE, Regime.BATCHED_GEMM), margin=0.0)
    cheap = dataclasses.replace(both, cascade=dataclasses.replace(both.cascade, launch_us=1e-3, hbm=1e9, tail=1e9))

    def regime_of(groups, **changes):
        spans = [(i, Span(i << 16, 8192)) for i in range(groups)]
        planner = Planner(
            Classifier(dataclasses.replace(cheap, **changes)), shape=Shape(32, 8, 128), counters=Counters(),
            capacities=capacities_of(engines),
        )  # fmt: skip
        plan = planner.decode("a", lambda: [(span,) for span in spans] * 2, lambda: groups * 2 * 8300)
        return plan.decision.regime, plan.decision.reason

    # Two requests in each of 16 groups: the cascade's graph for 32 rows holds 8 items.
    assert regime_of(8)[0] is Regime.CASCADE
    assert regime_of(16)[0] is Regime.BATCHED_GEMM
    # With no other, it shares the groups that it holds.
    assert regime_of(16, regimes=(Regime.CASCADE,))[0] is Regime.CASCADE
    assert capacities_of({Regime.CASCADE: Engine()}) == {}


class Memory:
    """Free bytes that fall by 3 MiB at each look."""

    def __init__(self):
        self.free = 1 << 30

    def __call__(self):
        self.free -= 3 << 20
        return self.free


def test_a_graph_for_each_size_and_regime_and_what_they_cost(caplog):
    engines = {Regime.CASCADE: Engine(), Regime.BATCHED_GEMM: Engine()}
    variants = GraphVariants(engines, Memory())
    held, seen = [], []
    for size in (8, 4):
        variants.capture(size, held.append, lambda label: seen.append((label, held[-1])))
    assert [label for label, _ in seen] == ["granikv-cascade", "granikv-batched_gemm"] * 2
    plans = [plan for _, plan in seen]
    assert [plan.rows for plan in plans] == [8, 8, 4, 4]
    assert all(plan.shared and not plan.items and plan.version < 0 for plan in plans)
    assert len({plan.version for plan in plans}) == 4
    assert held[1::2] == [None] * 4
    assert all(plan.variant == "" for plan in plans)
    cost = variants.cost()
    assert (cost["captured"], cost["mib"]) == ({"cascade": 2, "batched_gemm": 2}, 12.0)
    with caplog.at_level(logging.INFO):
        variants.report()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "4 graph variants (2 cascade, 2 batched_gemm)" in line and "12 MiB" in line


def test_an_engine_that_is_not_safe_in_graphs_gets_none(caplog):
    variants = GraphVariants({Regime.CASCADE: Engine(graph_safe=False)}, Memory())
    variants.capture(4, pytest.fail, pytest.fail)
    with caplog.at_level(logging.INFO):
        variants.report()
    assert variants.cost() == {"captured": {}, "seconds": 0.0, "mib": 0.0} and not caplog.records


def test_a_failed_capture_leaves_no_plan_behind():
    variants = GraphVariants({Regime.CASCADE: Engine()}, Memory())
    held = []

    def fail(label):
        raise MemoryError(label)

    with pytest.raises(MemoryError):
        variants.capture(4, held.append, fail)
    assert held[-1] is None


class Runner:
    def __init__(self, backend):
        self.attn_backend = backend


def test_the_runtime_captures_after_sglang_and_replays_the_label_of_the_plan():
    runtime = Runtime(GraniKVConfig())
    backend, _ = backend_of({})
    runner, captured = Runner(backend), []

    def original(_runner, size, _forward, _stream=None, label=None):
        captured.append((size, label, runtime._plan.decision.regime if runtime._plan else None))

    runtime._engines = {Regime.CASCADE: Engine(), Regime.BATCHED_GEMM: Engine(variants=("", "small"))}
    runtime._variants = GraphVariants(runtime._engines, Memory())
    runtime.around_capture(original, runner, 16, "forward", None, None)
    assert captured == [
        (16, None, None),
        (16, "granikv-cascade", Regime.CASCADE),
        (16, "granikv-batched_gemm", Regime.BATCHED_GEMM),
        (16, "granikv-batched_gemm-small", Regime.BATCHED_GEMM),
    ]
    for regime, label in [(Regime.CASCADE, "granikv-cascade"), (Regime.BATCHED_GEMM, "granikv-batched_gemm-small")]:
        runtime._plan = plan_of(regime)
        assert runtime.around_variant(lambda *_: None, runner, None) == label
    runtime._plan = dataclasses.replace(plan_of(Regime.BATCHED_GEMM), items=(ITEM, ITEM))
    assert runtime.around_variant(lambda *_: None, runner, None) == label_of(Regime.BATCHED_GEMM)
    runtime._plan = plan_of(Regime.UNIFORM)
    assert runtime.around_variant(lambda *_: None, runner, None) is None
    # A graph of SGLang's own has no shared twin.
    runtime._plan = plan_of(Regime.CASCADE)
    assert runtime.around_variant(lambda *_: "lora", runner, None) == "lora"
    assert runtime._plan is None
    # Another backend's runner is none of our business.
    captured.clear()
    runtime.around_capture(original, Runner(Stock()), 16, "forward", None, None)
    assert captured == [(16, None, None)]
