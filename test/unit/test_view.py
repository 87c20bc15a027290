"""What the live page shows of tree, pool and time: forest, slot map, seconds, decisions."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from granikv_sglang.config import GraniKVConfig
from granikv_sglang.core import Reason, Regime
from granikv_sglang.plan import Decision, Plan
from granikv_sglang.plan.base import Item, uniform_plan
from granikv_sglang.plugin.history import DECISIONS, SECONDS, History
from granikv_sglang.plugin.state import state_of
from granikv_sglang.plugin.view import forest, slot_map
from support.world import World

TEAM = array("q", range(1000, 1100))


def start(world: World, *tails: int, prefix: array = TEAM) -> None:
    for tail in tails:
        req = world.admit(prefix + array("q", range(tail, tail + 10)))
        assert req is not None
        assert world.prefill(req)


@pytest.fixture
def world() -> World:
    world = World(slots=2048)
    start(world, 10, 30, 50)
    world.promote()
    return world


def test_the_forest_shows_hot_nodes_their_members_and_what_is_private(world):
    shown = forest(world.tree, world.live)
    (node,) = shown["nodes"]
    assert (node["hot"], node["tokens"], node["members"], node["parent"]) == (True, 100, 3, None)
    assert node["start"] == world.tree.extents()[0][1].start
    assert (node["private_requests"], node["private_tokens"]) == (3, 30)
    assert (shown["private_requests"], shown["private_tokens"], shown["omitted"]) == (0, 0, 0)
    assert "text" not in node


def test_shared_cold_nodes_are_shown_and_outsiders_counted():
    world = World(slots=2048, min_tokens=512)
    start(world, 10, 30)
    start(world, 70, prefix=array("q", range(1, 41)))
    world.promote()
    shown = forest(world.tree, world.live)
    (node,) = shown["nodes"]
    assert (node["hot"], node["start"], node["members"]) == (False, None, 2)
    assert (shown["private_requests"], shown["private_tokens"]) == (1, 50)


def test_a_hot_node_that_nobody_holds_is_shown_with_no_members(world):
    for req in list(world.live):
        world.release(req, insert=True)
    (node,) = forest(world.tree, world.live)["nodes"]
    assert (node["hot"], node["members"], node["private_requests"]) == (True, 0, 0)


def test_parents_come_first_and_too_many_nodes_are_counted(world, monkeypatch):
    extended = TEAM + array("q", range(2000, 2064))
    start(world, 10, 30, prefix=extended)
    world.promote()
    nodes = forest(world.tree, world.live)["nodes"]
    seen: set[int | None] = {None}
    for node in nodes:
        assert node["parent"] in seen
        seen.add(node["node"])
    assert len(nodes) >= 2
    monkeypatch.setattr("granikv_sglang.plugin.view.MOST_NODES", 1)
    shown = forest(world.tree, world.live)
    assert (len(shown["nodes"]), shown["omitted"]) == (1, len(nodes) - 1)


def test_text_is_shown_only_when_asked_for(world):
    shown = forest(world.tree, world.live, lambda tokens: f"{len(tokens)} from {tokens[0]}")
    assert shown["nodes"][0]["text"] == "32 from 1000"


@pytest.mark.parametrize("cells", [1, 7, 480, 5000])
def test_the_map_adds_up_to_the_pool(world, cells):
    shown = slot_map(world.tree, cells)
    size = world.allocator.size
    assert sum(shown["hot"]) == world.tree.hot_tokens() == 100
    assert sum(shown["free"]) == world.allocator.available_size()
    assert len(shown["hot"]) == len(shown["free"]) == -(-size // shown["cell_slots"])
    assert len(shown["hot"]) <= cells
    for i, (hot, free) in enumerate(zip(shown["hot"], shown["free"], strict=True)):
        assert 0 <= hot + free <= min(shown["cell_slots"], size - i * shown["cell_slots"])


def test_the_map_shows_where_a_run_lies(world):
    shown = slot_map(world.tree, world.allocator.size)
    (span,) = (span for _, span in world.tree.extents())
    assert [i + 1 for i, hot in enumerate(shown["hot"]) if hot] == list(range(span.start, span.stop))


# -- history ----------------------------------------------------------------------------------------------------------


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def shared_plan() -> Plan:
    decision = Decision(Regime.CASCADE, Reason.MEMORY_BOUND)
    return Plan(decision, (Item(256, 64, (0, 1), 7),), np.full(2, 64, dtype=np.int32), 1)


def test_passes_are_counted_by_the_second_and_bytes_by_difference():
    clock = Clock()
    history = History(clock)
    history.note(uniform_plan(1, Reason.NOT_DECODE), 1, 0)
    history.note(shared_plan(), 2, 500)
    clock.now += 3
    history.note(shared_plan(), 2, 700)
    first, second = history.seconds()
    assert first == {
        "second": 1000,
        "passes": {"uniform": 1, "cascade": 1, "batched_gemm": 0},
        "bytes_not_reread": 500,
    }
    assert (second["second"], second["bytes_not_reread"]) == (1003, 200)


def test_equal_decisions_in_a_row_are_one_entry_newest_first():
    clock = Clock()
    history = History(clock)
    history.note(uniform_plan(1, Reason.NOT_DECODE), 1, 0)
    for _ in range(5):
        clock.now += 1
        history.note(shared_plan(), 2, 0)
    newest, oldest = history.decisions()
    assert newest == {
        **{"first": 1001.0, "last": 1005.0, "regime": "cascade", "reason": "memory_bound", "passes": 5},
        **{"requests": 2, "stretches": 1, "tokens_read_once": 64},
    }
    assert (oldest["reason"], oldest["passes"]) == ("not_decode", 1)


def test_history_is_bounded():
    clock = Clock()
    history = History(clock)
    for i in range(1000):
        clock.now += 1
        history.note(shared_plan() if i % 2 else uniform_plan(1, Reason.NOTHING_SHARED), 1, 0)
    assert len(history.seconds()) == SECONDS
    assert len(history.decisions()) == DECISIONS


def test_state_of_holds_the_live_part_only_with_a_history(world):
    config = GraniKVConfig()
    assert "live" not in state_of(config, "torch_native", world.tree, world.live)
    live = state_of(config, "torch_native", world.tree, world.live, History())["live"]
    assert set(live) == {"started", "requests", "forest", "map", "seconds", "decisions"}
    assert live["requests"] == 3
