"""The demo without its servers: prompts, speed, first difference, tables, bad options, and stopping a process."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from granikv_sglang.core import GraniKVError
from granikv_sglang.demo import __main__ as cli
from granikv_sglang.demo import report
from granikv_sglang.demo.client import Answer
from granikv_sglang.demo.compare import TIE_BOUND, Difference, first_difference, judge
from granikv_sglang.demo.measure import Speed, decode_speeds, joint_tokens, steady, total
from granikv_sglang.demo.teams import END_OF_TURN, MOST_PER_TEAM, TEAMS, answer_text, roster
from granikv_sglang.embedded import MODEL_FOLDER, cache_root, is_complete
from granikv_sglang.server import process

# -- prompts -----------------------------------------------------------------------------------------------------------


def token_count(text: str) -> int:
    folder = cache_root() / MODEL_FOLDER
    if not is_complete(folder):
        pytest.skip("the embedded model is not there; `python -m granikv_sglang.embedded` fetches it")
    tokenizers = pytest.importorskip("tokenizers")
    return len(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


@pytest.mark.parametrize("team", TEAMS, ids=lambda team: team.name)
def test_prefix_has_1500_to_2000_tokens(team: object) -> None:
    assert isinstance(team, type(TEAMS[0]))
    assert 1500 <= token_count(team.prefix) <= 2000


def test_prompts_stay_within_one_prefill_chunk() -> None:
    # SGLang reads up to 2048 tokens at once here; a prompt cut in two would blur when a team's document is open.
    assert max(token_count(agent.prompt) for agent in roster(MOST_PER_TEAM)) < 2048


def test_two_teams_of_six_take_turns_and_share_only_within_the_team() -> None:
    agents = roster(6)
    assert [agent.team for agent in agents[:3]] == [TEAMS[0].name, TEAMS[1].name, TEAMS[0].name]
    assert len(agents) == 12
    assert len({agent.question for agent in agents}) == 12
    for team in TEAMS:
        own = [agent for agent in agents if agent.team == team.name]
        assert [agent.place for agent in own] == list(range(6))
        assert all(agent.prompt.startswith(team.prefix) for agent in own)
    assert TEAMS[0].prefix[:80] != TEAMS[1].prefix[:80]


def test_answer_text_ends_with_the_turn() -> None:
    assert answer_text(f" Yes,\n\n at 06:58.{END_OF_TURN}\n<|im_start|>user") == "Yes, at 06:58."


# -- speed -------------------------------------------------------------------------------------------------------------


def steps(first: float, every: float, count: int) -> list[float]:
    return [first + every * i for i in range(count)]


def test_only_the_time_in_which_all_decode_counts() -> None:
    early, late = steps(0.0, 1.0, 20), steps(10.0, 1.0, 20)
    start, arrivals = joint_tokens([early, late])
    assert start == 10.0
    # Both have nine tokens in (10, 19]; the first token of the late one is the end of its prefill.
    assert len(arrivals) == 18
    assert arrivals[-1] == 19.0


def test_both_sides_are_cut_to_the_same_number_of_tokens() -> None:
    fast = [steps(5.0, 0.1, 31), steps(5.05, 0.1, 31)]
    slow = [steps(50.0, 0.4, 21), steps(50.2, 0.4, 21)]
    speeds = decode_speeds(fast, slow)
    assert speeds is not None
    assert speeds[0].tokens == speeds[1].tokens
    assert speeds[0].per_second / speeds[1].per_second == pytest.approx(4.0, rel=0.05)


def test_a_long_prefill_does_not_change_the_speed() -> None:
    quick = [steps(1.0, 0.2, 30), steps(1.0, 0.2, 30)]
    late = [steps(99.0, 0.2, 30), steps(99.0, 0.2, 30)]
    speeds = decode_speeds(quick, late)
    assert speeds is not None
    assert speeds[0].per_second == pytest.approx(speeds[1].per_second)
    assert speeds[0].per_second == pytest.approx(10.0)


def test_rounds_are_put_together_by_tokens_and_seconds_not_by_their_speeds() -> None:
    assert total([Speed(100, 1.0), Speed(100, 9.0)]).per_second == pytest.approx(20.0)


def test_rounds_that_disagree_are_not_steady() -> None:
    stock = Speed(100, 10.0)
    assert steady([(Speed(100, 3.0), stock), (Speed(100, 3.6), stock)])
    assert not steady([(Speed(100, 12.0), stock), (Speed(100, 1.0), stock)])
    assert not steady([])


@pytest.mark.parametrize(
    "stamps",
    [
        [],
        [[]],
        [steps(0, 1, 5), []],
        [steps(0, 1, 5), steps(9, 1, 5)],
        [steps(0, 1, 4), steps(0, 1, 4)],
    ],
    ids=["none", "no token", "one silent", "never together", "three steps"],
)
def test_too_little_joint_decoding_gives_no_speed(stamps: list[list[float]]) -> None:
    assert decode_speeds(stamps, stamps) is None


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "stock", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 5, 3], Difference(1, 2, 5)),
        ([4], [5], Difference(0, 4, 5)),
        ([1, 2], [1, 2, 3], Difference(2, None, 3)),
        ([1, 2, 3], [1, 2], Difference(2, 3, None)),
        ([], [7], Difference(0, None, 7)),
    ],
)
def test_first_difference(ours: list[int], stock: list[int], expected: Difference | None) -> None:
    assert first_difference(ours, stock) == expected


def test_two_tokens_within_the_bound_on_both_servers_are_a_tie() -> None:
    verdict = judge(Difference(3, 7, 9), [(-1.0, 7), (-1.0 - TIE_BOUND / 2, 9)], [(-1.0, 9), (-1.0001, 7)])
    assert verdict.tie
    assert "5.0e-04" in verdict.text


@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        ([(-1.0, 7), (-1.0001, 9)], [(-1.0, 9), (-1.5, 7)]),
        ([(-1.0, 7), (-1.1, 9)], [(-1.0, 9), (-1.0, 7)]),
        ([(-1.0, 7), (-1.0, 9)], [(-1.0, 9), (-1.0, 8)]),
        ([], [(-1.0, 9), (-1.0, 7)]),
    ],
    ids=["stock is sure", "we are sure", "another token", "no answer"],
)
def test_anything_else_is_a_fault(ours: list[tuple[float, int]], stock: list[tuple[float, int]]) -> None:
    assert not judge(Difference(3, 7, 9), ours, stock).tie


def test_a_shorter_answer_is_a_fault() -> None:
    even = [(-1.0, 7), (-1.0, 9)]
    assert not judge(Difference(3, None, 9), even, even).tie


# -- report ------------------------------------------------------------------------------------------------------------


def test_table_aligns_text_left_and_numbers_right() -> None:
    text = report.table(("regime", "passes"), [("cascade", 7), ("uniform", 1234)])
    assert text == textwrap.indent("regime   passes\n-------  ------\ncascade       7\nuniform    1234", "  ")


def test_table_without_rows_is_its_head() -> None:
    assert report.table(("a", "bb"), []).splitlines() == ["  a  bb", "  -  --"]


def test_counters_between_is_nested_and_knows_new_keys() -> None:
    before = {"promotions": 1, "steps": {"cascade": {"memory_bound": 2}}}
    after = {"promotions": 3, "steps": {"cascade": {"memory_bound": 5, "forced": 1}}, "audits": 4}
    assert report.counters_between(before, after) == {
        "promotions": 2,
        "steps": {"cascade": {"memory_bound": 3, "forced": 1}},
        "audits": 4,
    }


def test_everything_fits_80_columns() -> None:
    answer = Answer(roster(6)[-1], text="Because " * 60)
    snapshot = {
        "options": {"min_tokens": 512},
        "extents": [
            {"node": 1, "start": 14336, "tokens": 1825, "members": 6},
            {"node": 2, "start": 65536, "tokens": 4, "members": 12},
        ],
    }
    delta = {
        "promotions": 1,
        "promoted_tokens": 1825,
        "bytes_not_reread": 123_456_789_012,
        "shared_steps": 40,
        "steps": {"batched_gemm": {"compute_bound": 40}, "uniform": {"nothing_shared": 10, "not_decode": 0}},
        "declines": {"too_short": 1},
    }
    speed = (Speed(480, 10.0), Speed(480, 42.0))
    verdict = judge(Difference(3, 7, 9), [(-1.0, 7), (-1.0, 9)], [(-1.0, 9), (-1.0, 7)])
    text = "\n".join(
        [
            report.introduction(6, 48),
            report.transcript_entry(answer),
            report.hot_report(snapshot, delta),
            report.speed_report([speed, speed], [(30.0, 90.0), (20.0, 70.0)]),
            report.speed_report([], [(30.0, 90.0), (20.0, 70.0)]),
            report.equality_report(12, 576, [(answer, verdict)]),
        ]
    )
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\x1b" not in text
    for part in ("4.20 times stock", "123.5 GB", "compute_bound", "tie: [Library redesign] treasurer"):
        assert part in text
    assert "not_decode" not in text
    assert len(report.groups(snapshot)) == 1


# -- command line and processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [["--max-tokens", "5"], ["--requests-per-team", "7"], ["--requests-per-team", "x"]])
def test_a_bad_option_is_one_line_that_names_the_range(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(bad)
    assert ended.value.code == 2
    assert "a whole number from" in capsys.readouterr().err.splitlines()[-1]


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> process.Server:
    """A Server whose process runs ``code`` instead of SGLang."""
    real = subprocess.Popen

    def popen(_argv: list[str], **kwargs: object) -> subprocess.Popen[bytes]:
        return real([sys.executable, "-c", code], **kwargs)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(process.subprocess, "Popen", popen)
    return process.Server("GraniKV", process.free_ports(1)[0], (), folder)


def test_a_server_that_ends_while_starting_names_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = stand_in(monkeypatch, tmp_path, "print('no such flag'); raise SystemExit(3)")
    with pytest.raises(GraniKVError) as failed:
        process.wait_ready([server], lambda _: None, limit=30)
    assert "exit code 3" in str(failed.value)
    assert str(tmp_path / "granikv.log") in str(failed.value)
    assert "no such flag" in str(failed.value)
    server.stop()


def test_a_server_that_never_serves_is_given_up_and_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    server = stand_in(monkeypatch, tmp_path, code)
    monkeypatch.setattr(process, "STOP_SECONDS", 0.5)
    try:
        with pytest.raises(GraniKVError, match="did not start within"):
            process.wait_ready([server], lambda _: None, limit=0.5)
    finally:
        server.stop()
        server.stop()
    with pytest.raises(GraniKVError, match="ended with exit code"):
        server.poll_ready()


def test_free_ports_are_all_different_and_none_that_the_kernel_hands_out() -> None:
    found = process.free_ports(20)
    assert len(set(found)) == 20
    with socket.socket() as asks_for_none:
        asks_for_none.bind((process.HOST, 0))
        assert max(found) < asks_for_none.getsockname()[1]


def test_a_port_somebody_listens_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((process.HOST, process.free_ports(1)[0]))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(process, "_OWN_PORTS", range(port, port + 40))
        assert port not in process.free_ports(5)
