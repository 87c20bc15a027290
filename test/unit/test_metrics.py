"""Prometheus metrics: names by the conventions, every counter published, rates right."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import prometheus_client
import pytest

from granikv_sglang.core import Counters, Decline, Reason, Regime
from granikv_sglang.plugin import metrics
from granikv_sglang.plugin.metrics import METRICS, Metrics
from support.world import World

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docs" / "grafana" / "granikv.json"


@pytest.fixture
def registry(monkeypatch):
    """A registry of the test's own: metrics are registered for good otherwise."""
    made = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge"):
        cls = getattr(prometheus_client, kind)
        monkeypatch.setattr(metrics, kind, lambda *a, cls=cls, **k: cls(*a, registry=made, **k))
    return made


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric):
    assert re.fullmatch(r"granikv_[a-z]+(_[a-z]+)*", metric.name)
    assert not re.search(r"_(count|sum|bucket|info|created)$", metric.name)
    if "bytes" in metric.name:
        assert re.search(r"_bytes(_total)?$", metric.name), "the unit comes last, before _total"
    assert metric.text.endswith(".")


def test_every_plain_counter_of_the_process_is_published():
    plain = {f.name for f in dataclasses.fields(Counters) if f.type == "int"}
    assert plain == {metric.counter for metric in METRICS if metric.counter}


def test_values_follow_the_counters(registry):
    world = World(slots=1024)
    published = Metrics("m", 0)
    world.counters.promotions = 2
    world.counters.steps[(Regime.CASCADE, Reason.MEMORY_BOUND)] = 5
    world.counters.declines[Decline.NO_ROOM] = 1
    published.publish(world.counters, world.tree)
    world.counters.promotions = 3
    world.counters.steps[(Regime.CASCADE, Reason.MEMORY_BOUND)] = 9
    published.publish(world.counters, world.tree)
    published.publish(world.counters, world.tree)
    own = {"model_name": "m", "tp_rank": "0"}

    def value(name, **labels):
        return registry.get_sample_value(name, {**own, **labels})

    assert value("granikv_promotions_total") == 3
    assert value("granikv_hot_evictions_total") == 0
    assert value("granikv_forward_passes_total", regime="cascade", reason="memory_bound") == 9
    assert value("granikv_promotion_declines_total", reason="no_room") == 1
    slots = {state: value("granikv_slots", state=state) for state in ("hot", "cold", "free")}
    assert slots == {"hot": 0, "cold": 0, "free": 1024}


def expressions() -> list[str]:
    return [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_that_exist():
    asked = {name for expr in expressions() for name in re.findall(r"granikv_[a-z_]+", expr)}
    assert asked <= {metric.name for metric in METRICS}
    assert len(asked) >= 8


def test_the_dashboard_takes_rates_of_counters_only():
    counters = {metric.name for metric in METRICS if metric.is_counter}
    for expr in expressions():
        for name in re.findall(r"granikv_[a-z_]+", expr):
            rated = bool(re.search(rf"(?:rate|increase)\({name}\b", expr))
            assert rated is (name in counters), expr
        labels = set(re.findall(r"(?:by|without) \(([a-z_, ]+)\)", expr))
        known = {"model_name", "tp_rank", "instance"} | {label for metric in METRICS for label in metric.labels}
        assert {name.strip() for group in labels for name in group.split(",")} <= known


def test_dashboard_panels_have_titles_descriptions_and_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"] and panel["description"]
        box = panel["gridPos"]
        assert box["x"] + box["w"] <= 24
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert not cells & taken
        taken |= cells
