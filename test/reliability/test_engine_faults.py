"""An engine that raises: the request is served by UNIFORM, the fault counted and logged once, a bad regime given up."""

from __future__ import annotations

import logging

import pytest

from granikv_sglang.core import Decline, Reason, Regime
from reliability.conftest import words

PREFIX = words(201, 160)
NEW = 20


def prompt(index: int) -> list[int]:
    return [*PREFIX, 401 + index, 9]


class Flaky:
    """Stands in for an engine's method and raises at chosen calls."""

    def __init__(self, method, calls, before=lambda *_: None) -> None:
        self.method, self.wanted, self.before, self.calls = method, calls, before, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls in self.wanted:
            self.before(*args)
            raise RuntimeError("a kernel that raises")
        return self.method(*args)


@pytest.fixture
def backend(driver):
    return driver.scheduler.tp_worker.model_runner.attn_backend


def engine_of(backend):
    (engine,) = {id(e): e for e in backend._engines.values()}.values()
    return engine


def answers_equal_cold(driver, count=3):
    expected = [driver.cold(prompt(i), NEW) for i in range(count)]
    assert driver.answer(*[driver.request(prompt(i), NEW) for i in range(count)]) == expected


@pytest.mark.parametrize("layer", [1, 2])
def test_a_layer_that_raises_is_finished_by_the_stock_backend(driver, backend, monkeypatch, caplog, layer):
    """In the first layer nothing is done yet, in the second the engine's first layer is kept."""
    for i in range(3):
        driver.cold(prompt(i), NEW)
    engine = engine_of(backend)
    # Two layers a pass: this is the third shared pass.
    monkeypatch.setattr(engine, "run", Flaky(engine.run, {4 + layer}))
    before = driver.counters.engine_faults
    with caplog.at_level(logging.ERROR):
        answers_equal_cold(driver)
    assert driver.counters.engine_faults == before + 1
    logged = [r.getMessage() for r in caplog.records if "GraniKV: a fault in" in r.getMessage()]
    assert len(logged) == 1
    assert "regime cascade" in logged[0]
    assert "UNIFORM" in logged[0]


def test_a_half_prepared_plan_is_never_used(driver, backend, monkeypatch):
    """The engine already believes to have this plan when it raises; the same batch comes again in the next step."""
    for i in range(3):
        driver.cold(prompt(i), NEW)
    engine = engine_of(backend)

    def half(plan, _batch):
        engine._version, engine._starts = plan.version, [1]

    monkeypatch.setattr(engine, "prepare", Flaky(engine.prepare, {1, 4}, half))
    before = driver.counters.engine_faults
    answers_equal_cold(driver)
    assert driver.counters.engine_faults == before + 2


def test_after_repeated_faults_the_regime_is_off_and_says_so_once(driver, backend, monkeypatch, caplog):
    for i in range(3):
        driver.cold(prompt(i), NEW)
    engine = engine_of(backend)
    flaky = Flaky(engine.run, range(10**6))
    monkeypatch.setattr(engine, "run", flaky)
    before = driver.counters.engine_faults
    with caplog.at_level(logging.ERROR):
        answers_equal_cold(driver)
        answers_equal_cold(driver)
    assert driver.counters.engine_faults == before + 3
    assert flaky.calls == 3
    messages = [r.getMessage() for r in caplog.records]
    assert len([m for m in messages if "a fault in" in m]) == 1
    assert len([m for m in messages if "regime cascade is switched off (3 faults)" in m]) == 1
    assert driver.counters.steps[Regime.UNIFORM, Reason.ENGINE_OFF] > 10


@pytest.mark.parametrize("method", ["prepare", "run"])
def test_a_prefill_that_raises_is_finished_by_the_stock_backend(driver, backend, monkeypatch, method):
    for i in range(4):
        driver.cold(prompt(i), NEW)
    answers_equal_cold(driver, 2)
    assert driver.tree.hot
    flaky = Flaky(getattr(backend._extend, method), {1})
    monkeypatch.setattr(backend._extend, method, flaky)
    before = driver.counters.engine_faults
    assert driver.answer(driver.request(prompt(3), NEW)) == [driver.expected[tuple(prompt(3)), NEW]]
    assert flaky.calls >= 1
    assert driver.counters.engine_faults == before + 1
    assert not driver.runtime._breakers["prefill"].off


def test_promotion_is_given_up_after_repeated_failures(driver, backend, monkeypatch, caplog):
    def fail(*_):
        raise MemoryError("no staging buffer")

    promoter = driver.runtime._promoter
    monkeypatch.setattr(promoter, "_copy", fail)
    before = driver.counters.promotions
    with caplog.at_level(logging.ERROR):
        for group in range(5):
            prefix = words(210 + group, 80)
            together = driver.answer(*[driver.request([*prefix, 401 + i], NEW) for i in range(2)])
            assert len(together) == 2
    assert driver.counters.promotions == before
    assert promoter._breaker.faults == 3
    assert driver.counters.declines[Decline.SWITCHED_OFF] >= 1
    messages = [r.getMessage() for r in caplog.records]
    assert len([m for m in messages if "a fault in promotion" in m]) == 1
    assert len([m for m in messages if "promotion is switched off" in m]) == 1


def test_a_graph_that_cannot_be_captured_gives_its_regime_up(driver, backend):
    """No GPU is needed to see what follows: the regime is never chosen."""
    runtime = driver.runtime
    runtime._no_graph(Regime.CASCADE, RuntimeError("capture failed"))
    before = driver.counters.steps[Regime.UNIFORM, Reason.ENGINE_OFF]
    answers_equal_cold(driver)
    assert driver.counters.steps[Regime.UNIFORM, Reason.ENGINE_OFF] > before
