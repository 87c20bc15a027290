"""Each gate on both sides of its bound, and the numbers of a turn."""

from __future__ import annotations

import dataclasses

import pytest
from sglang.benchmark.datasets import DatasetRow
from sglang.benchmark.serving import calculate_metrics

from granikv_sglang.bench_serving.gates import Answer, Parting, Turn, differences, judge_all
from granikv_sglang.bench_serving.id_requests import IdOutput, IdTokenizer
from granikv_sglang.bench_serving.machine import cpu_clocks, gpu_clocks
from granikv_sglang.bench_serving.results import side_summary, speedups
from granikv_sglang.bench_serving.runner import growth, measures
from granikv_sglang.bench_serving.workload import Ask
from granikv_sglang.demo.compare import Difference

ANSWER = Answer("a", (1, 2), 100, 3, (7, 8, 9), True, cached=90)
TURN = Turn("granikv", 0, "warm", (ANSWER, dataclasses.replace(ANSWER, rid="b")), clocks={"sm_mhz": 1980})


def other(**changes):
    """A stock turn that differs in its first answer."""
    answers = (dataclasses.replace(ANSWER, **changes), TURN.answers[1])
    return dataclasses.replace(TURN, side="stock", answers=answers)


def failing(ours, stock, partings=(), exact=True):
    return {gate.name: gate.text for gate in judge_all([ours], [stock], partings, exact_lengths=exact) if not gate.ok}


def test_equal_turns_pass():
    assert failing(TURN, other()) == {}


@pytest.mark.parametrize(
    ("changes", "gates"),
    [
        ({"token_ids": (7, 8)}, {"output tokens", "outputs"}),
        ({"ok": False, "token_ids": (7,), "error": "reset"}, {"output tokens", "finished requests"}),
        ({"token_ids": (7, 8, 1)}, {"outputs"}),
        ({"retractions": 1}, {"retractions"}),
        ({"cached": 85}, {"cache state"}),
    ],
    ids=str,
)
def test_each_gate_fails_alone(changes, gates):
    assert set(failing(TURN, other(**changes))) == gates


def test_within_tolerance_the_cache_state_is_equal():
    assert failing(TURN, other(cached=87)) == {}


def test_both_sides_short_is_invalid_too_unless_answers_may_end():
    short = dataclasses.replace(TURN, answers=(dataclasses.replace(ANSWER, token_ids=(7,)),))
    assert set(failing(short, dataclasses.replace(short, side="stock"))) == {"output tokens"}
    assert failing(short, dataclasses.replace(short, side="stock"), exact=False) == {}


def test_nothing_finished_is_invalid():
    none = dataclasses.replace(TURN, answers=(dataclasses.replace(ANSWER, ok=False, token_ids=()),))
    assert {"output tokens", "finished requests"} <= set(failing(none, none, exact=False))


def test_retraction_on_both_sides_passes():
    ours = dataclasses.replace(TURN, answers=tuple(dataclasses.replace(a, retractions=2) for a in TURN.answers))
    assert failing(ours, other(retractions=1)) == {}


def test_other_states_and_unrecorded_clocks_are_invalid():
    assert set(failing(TURN, dataclasses.replace(other(), state="cold"))) == {"cache state"}
    assert set(failing(dataclasses.replace(TURN, clocks={}), other())) == {"clocks"}


@pytest.mark.parametrize(("mhz", "fails"), [(1900, False), (1500, True)])
def test_clocks_that_differ_are_invalid(mhz, fails):
    stock = dataclasses.replace(other(), clocks={"sm_mhz": mhz})
    assert ("clocks" in failing(TURN, stock)) is fails


def test_a_difference_needs_a_tie():
    stock = other(token_ids=(7, 8, 1))
    (found,) = differences(TURN, stock)
    assert found[1] == Difference(2, 9, 1)
    tie = Parting("a", 0, found[1], True, "close")
    assert failing(TURN, stock, [tie]) == {}
    wrong = dataclasses.replace(tie, tie=False, text="far apart")
    assert "far apart" in failing(TURN, stock, [wrong])["outputs"]


def test_the_metrics_are_sglangs_own():
    asks = [Ask(f"r{i}", "g", (1,) * (10 + i), 10 + i, 4) for i in range(3)]
    outputs = []
    for i, ask in enumerate(asks):
        stamps = [1.0 + 0.1 * i + 0.02 * n for n in range(4)]
        output = IdOutput(success=True, start_time=0.5, ttft=stamps[0] - 0.5, latency=stamps[-1] - 0.5, rid=ask.rid)
        output.itl, output.stamps, output.token_ids = [0.02] * 3, stamps, [5, 6, 7, 8]
        output.output_len, output.generated_text, output.cached_tokens = 4, "5 6 7 8", 3
        outputs.append(output)
    # In any order: records come as requests end.
    found = measures(asks, outputs[::-1], 2.0, streamed=True)
    rows = [DatasetRow(prompt="", prompt_len=ask.prompt_len, output_len=4) for ask in asks]
    theirs, _ = calculate_metrics(rows, outputs, 2.0, IdTokenizer(), "sglang")
    for name in ("output_throughput", "request_throughput", "mean_ttft_ms", "p99_ttft_ms", "median_tpot_ms"):
        assert found[name] == pytest.approx(getattr(theirs, name))
    assert found["output_throughput"] == pytest.approx(6)
    assert found["mean_itl_ms"] == pytest.approx(20)
    assert found["median_ttft_ms"] == pytest.approx(600)
    assert (found["cached_tokens"], found["input_tokens"], found["output_tokens"]) == (9, 33, 12)
    # No time in which all three decode: the first ends before the last begins.
    assert found["decode_throughput"] is None
    assert measures(asks, outputs, 2.0, streamed=False)["mean_ttft_ms"] is None


def test_speedups_are_paired_by_repetition():
    def turn(side, repetition, speed):
        return Turn(side, repetition, "warm", (), {"output_throughput": speed, "decode_throughput": None})

    ours = [turn("granikv", i, speed) for i, speed in enumerate((20, 30, 90))]
    stock = [turn("stock", i, speed) for i, speed in enumerate((10, 10, 60))]
    assert speedups(ours, stock) == {"output_throughput": [2.0, 1.5, 3.0]}
    assert side_summary(ours)["metrics"] == {"output_throughput": [30, 20, 90]}


def test_growth_is_what_moved():
    before = {"a": 1, "steps": {"x": {"y": 2}}, "still": 5}
    after = {"a": 4, "steps": {"x": {"y": 2, "z": 3}}, "still": 5, "new": 1, "label": "text"}
    assert growth(before, after) == {"a": 3, "steps": {"x": {"z": 3}}, "new": 1}


def test_gpu_clocks_are_medians_of_the_busy_samples():
    text = "300, 2619, 30, 80.5, 0\n1980, 3201, 50, 600, 99\n1950, 3201, 52, 640, 98\n1965, 3201, 51, 620, 97\n19"
    found = gpu_clocks(text)
    assert (found["sm_mhz"], found["memory_mhz"], found["samples"]) == (1965, 3201, 3)
    assert gpu_clocks("") == {}
    assert gpu_clocks("[N/A], 1, 2, 3, 4") == {}
    # A virtual machine may hide the power draw; the rest counts.
    hidden = gpu_clocks("1980, 3201, 50, [N/A], 99\n1970, 3201, 50, [N/A], 98")
    assert hidden == {"sm_mhz": 1975, "memory_mhz": 3201, "celsius": 50, "busy_percent": 98.5, "samples": 2}


def test_a_cpu_always_has_something_to_record():
    assert "load_1m" in cpu_clocks()
