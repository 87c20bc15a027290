"""Two processes over gloo: the same schedule gives the same decisions, and a rank that differs is noticed, not hung."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from granikv_sglang.server.process import free_ports
from support.rank import SCENARIOS, STEPS

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What both ranks said in every scenario; one pair of processes for all, most of whose time is imports."""
    (port,) = free_ports(1)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.rank"]
    # Files, not pipes: a rank whose pipe is full would stop, and the other wait for it.
    outputs = [tmp_path_factory.mktemp("ranks") / f"{rank}.jsonl" for rank in range(2)]
    processes = []
    said: dict[str, list[dict[str, Any]]] = {name: [] for name in SCENARIOS}
    try:
        for rank, output in enumerate(outputs):
            with output.open("w") as stdout:
                processes.append(subprocess.Popen([*command, str(rank), str(port)], env=env, stdout=stdout))
        for process in processes:
            process.wait(400)
        for output in outputs:
            for scenario in map(json.loads, output.read_text().splitlines()):
                said[scenario["scenario"]].append(scenario)
    finally:
        for process in processes:
            process.kill()
    assert processes[1].returncode == 9
    return said


@pytest.mark.parametrize("scenario", ["none", "ties"])
def test_two_ranks_take_identical_decisions_over_a_long_schedule(ranks, scenario):
    """Promotions, evictions, splits and regimes; with ``ties`` the clock stands still, so age decides nothing."""
    ours, theirs = ranks[scenario]
    assert len(ours["steps"]) == STEPS
    assert ours["message"] == theirs["message"] == ""
    assert ours["steps"] == theirs["steps"]
    assert ours["counters"] == theirs["counters"]
    seen = ours["counters"]
    assert seen["promotions"] > 10
    assert seen["hot_evictions"] > 5
    assert seen["hot_splits"] > 0
    assert seen["shared_steps"] > 50
    assert seen["steps"]["uniform"]


@pytest.mark.parametrize("scenario", ["eviction", "regime", "promotion", "answer"])
def test_a_rank_that_decides_otherwise_stops_both_with_a_clear_message(ranks, scenario):
    for rank, said in enumerate(ranks[scenario]):
        assert len(said["steps"]) < STEPS
        message = said["message"]
        assert message.startswith("tensor-parallel ranks no longer decide alike")
        assert "\n" not in message
        assert f"rank {rank} stops" in message
        assert f"rank {1 - rank} is at" in message
        assert "Last decisions here: " in message
        assert "--granikv-off" in message
        assert f"GraniKV: {message}" in said["logged"]


def test_a_copy_that_fails_on_one_rank_promotes_on_none(ranks):
    """Memory is each rank's own: from then on nothing is promoted anywhere, and both live and agree to the end."""
    ours, theirs = ranks["copy"]
    assert ours["message"] == theirs["message"] == ""
    assert len(ours["steps"]) == STEPS
    assert ours["steps"] == theirs["steps"]
    assert ours["counters"] == theirs["counters"]
    assert ours["counters"]["declines"]["copy_failed"] >= 1
    assert ours["counters"]["declines"]["switched_off"] >= 1
    assert ours["counters"]["promotions"] > 5
    assert "the copy failed on another rank" in ours["logged"][0]
    assert "no memory on this rank" in theirs["logged"][0]


def test_a_rank_that_ends_does_not_leave_the_other_hanging(ranks):
    (ours,) = ranks["death"]
    assert len(ours["steps"]) < STEPS
    assert "no answer from another rank" in ours["message"]
    assert "Last decisions here: " in ours["message"]
