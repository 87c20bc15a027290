"""Predicted against measured time while serving: read without waiting, only where it belongs to the plan."""

import time
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from granikv_sglang.backends.attention import GraniKVAttnBackend
from granikv_sglang.backends.timer import EventTimer, HostTimer, events_work_in_graphs
from granikv_sglang.config import GraniKVConfig
from granikv_sglang.core import Counters, Reason, Regime
from granikv_sglang.plan import Classifier, Decision, Kind, Machine, Planner, Shape, uniform_plan
from granikv_sglang.plugin.engines import timer_of
from granikv_sglang.plugin.runtime import Runtime
from granikv_sglang.plugin.sampling import EVERY, SETTLED, Sampler
from support.world import World


class Timer:
    """Says what it is told to say."""

    layer = 0

    def __init__(self):
        self.us, self.asked = 40.0, 0

    def read(self, key):
        self.asked += 1
        return self.us


def sampler_of(timer, key=(Regime.UNIFORM, 4)):
    counters = Counters()
    return Sampler(timer, lambda: key, counters), counters


def plan(version=1):
    return uniform_plan(4, Decision(Regime.UNIFORM, Reason.TOO_SMALL), version)


def test_one_pass_in_many_is_sampled():
    timer = Timer()
    sampler, counters = sampler_of(timer)
    for _ in range(3 * EVERY):
        sampler.before(plan(), lambda: 50.0)
    assert timer.asked == counters.sampled[Regime.UNIFORM] == 3
    assert counters.as_dict()["sampled"]["uniform"] == {
        "passes": 3, "predicted_us": 50.0, "measured_us": 40.0, "ratio": 0.8,
    }  # fmt: skip


def test_a_plan_that_has_not_settled_is_not_compared():
    timer = Timer()
    sampler, counters = sampler_of(timer)
    for i in range(2 * EVERY):
        sampler.before(plan(version=i // SETTLED), lambda: 50.0)
    assert timer.asked == 0
    for _ in range(SETTLED + 1):
        sampler.before(plan(version=-1), lambda: 50.0)
    assert counters.sampled[Regime.UNIFORM] == 1


def test_a_pass_in_flight_is_asked_for_again():
    timer = Timer()
    timer.us = None
    sampler, counters = sampler_of(timer)
    for _ in range(EVERY + 5):
        sampler.before(plan(), lambda: 50.0)
    assert timer.asked == 6 and not counters.sampled
    timer.us = 41.0
    sampler.before(plan(), lambda: 50.0)
    assert counters.measured_ns[Regime.UNIFORM] == 41000


def test_a_pass_that_ran_otherwise_than_planned_is_not_compared():
    for key in (None, (Regime.CASCADE, 4)):
        timer = Timer()
        sampler, counters = sampler_of(timer, key)
        for _ in range(2 * EVERY):
            sampler.before(plan(), lambda: 50.0)
        assert timer.asked == 0 and not counters.sampled


def test_the_backend_times_one_layer_and_says_what_the_pass_was():
    class Stock:
        def init_forward_metadata(self, batch):
            pass

        def forward_decode(self, q, *args, **kwargs):
            time.sleep(0.002)
            return q

    timer = HostTimer(layer=3)
    backend = GraniKVAttnBackend(Stock(), {}, None, lambda: None, torch.zeros(4, 8), None, timer=timer)
    mode = SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False)
    backend.init_forward_metadata(SimpleNamespace(forward_mode=mode, batch_size=2))
    assert backend.timed == (Regime.UNIFORM, 2)
    q = torch.zeros(2, 16)
    backend.forward_decode(q, None, None, SimpleNamespace(layer_id=2), None)
    assert timer.read(backend.timed) is None
    assert backend.forward_decode(q, None, None, SimpleNamespace(layer_id=3), None) is q
    assert timer.read(backend.timed) >= 2000
    assert timer.read((Regime.CASCADE, 2)) is None
    backend.init_forward_metadata(SimpleNamespace(forward_mode=SimpleNamespace(
        is_decode=lambda: False, is_extend=lambda: False), batch_size=2))  # fmt: skip
    assert backend.timed is None


def test_events_are_read_only_when_both_are_past_and_in_order(monkeypatch):
    made = []

    class Event:
        def __init__(self, enable_timing, external):
            assert enable_timing and external
            self.done, self.at = False, 0.0
            made.append(self)

        def record(self):
            self.recorded = True

        def query(self):
            return self.done

        def elapsed_time(self, other):
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer, key = EventTimer(5), (Regime.CASCADE, 8)
    assert timer.read(key) is None
    timer.start(key)
    timer.stop(key)
    timer.start(key)
    begin, end = made
    assert begin.recorded and end.recorded
    begin.done, begin.at, end.at = True, 1.0, 1.25
    assert timer.read(key) is None
    end.done = True
    assert timer.read(key) == 250.0
    # A replay in flight has stamped the first event anew.
    begin.at = 3.0
    assert timer.read(key) is None


def test_a_gpu_that_cannot_time_events_in_graphs_serves_without_the_metric(monkeypatch, caplog):
    def refuse(*_args, **_kwargs):
        raise RuntimeError("invalid argument\nmore")

    monkeypatch.setattr(torch, "zeros", refuse)
    assert not events_work_in_graphs()
    assert timer_of(True, 32) is None
    assert "not timed while serving, CUDA says: invalid argument" in caplog.text
    assert timer_of(False, 32).layer == 16


@pytest.mark.parametrize("counted_by", ["seq_lens_cpu", "requests"])
def test_the_runtime_samples_decode_passes_with_the_tokens_of_now(counted_by):
    """Passes that share nothing are predicted as well: they are what drift of the stock backend shows in."""
    runtime, world = Runtime(GraniKVConfig()), World(slots=256)
    runtime.tree = world.tree
    runtime._planner = Planner(Classifier.of(Machine(Kind.CPU, 1)), shape=Shape(9, 3, 64, 4), counters=runtime.counters)
    runtime._sampler = Sampler(Timer(), lambda: (Regime.UNIFORM, 2), runtime.counters)
    reqs = [
        SimpleNamespace(rid=rid, last_node=world.tree.root_node, origin_input_ids=[1] * 500, output_ids=[2] * n)
        for rid, n in (("a", 3), ("b", 5))
    ]
    lens = torch.tensor([503, 505]) if counted_by == "seq_lens_cpu" else None
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, reqs=reqs, seq_lens_cpu=lens)
    for _ in range(EVERY + 1):
        plan = runtime._plan_for(batch)
    assert plan.decision.reason is Reason.NOTHING_SHARED
    expected = runtime._planner.predicted_us(1008)
    assert runtime.counters.predicted_ns[Regime.UNIFORM] == round(expected * 1e3) > 0
    assert runtime.counters.measured_ns[Regime.UNIFORM] == 40_000
