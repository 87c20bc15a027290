"""The comparison from command line to exit code, against two stand-in servers: order, equality, gates, faults."""

from __future__ import annotations

import gc
import json
import shlex
import time
import types
from collections.abc import Iterator

import pytest
from sglang.benchmark import serving

from granikv_sglang.bench_serving import machine, runner, sides
from granikv_sglang.bench_serving.__main__ import main
from support.fake_server import FakeServer, Faults

LOAD = shlex.split("--dataset-name multi-agent --ma-agents 4 --ma-prefix-len 64 --ma-private-len 8 --ma-output-len 6")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """SGLang's load generator pauses a second before it sends; the stand-in needs no rest."""
    monkeypatch.setattr(serving, "time", types.SimpleNamespace(**{**vars(time), "sleep": lambda _seconds: None}))


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    """``(stock, granikv)``, both running."""
    pair = (FakeServer().start(), FakeServer(granikv=True).start())
    yield pair
    for server in pair:
        server.stop()


@pytest.fixture
def compare(servers, tmp_path):
    """Run a comparison of the two; ``(exit code, records)``."""

    def run(*more: str, load=LOAD):
        stock, granikv = servers
        out = tmp_path / "out.jsonl"
        urls = ["--compare", stock.url, "--base-url", granikv.url]
        code = main([*load, *urls, "--output-file", str(out), *more])
        return code, [json.loads(line) for line in out.read_text().splitlines()]

    return run


def of_kind(records, kind):
    return [record for record in records if record["kind"] == kind]


def measured(server):
    """Measured prompts of a server, by repetition (a warm prefix and the warm-up carry no or other ids)."""
    runs: list[dict[str, list[int]]] = []
    for rid, prompt in server.prompts:
        if rid:
            if not runs or rid in runs[-1]:
                runs.append({})
            runs[-1][rid] = prompt
    return runs


def test_a_valid_comparison(compare, servers, capsys):
    code, records = compare("--warmup-requests", "0")
    out = capsys.readouterr().out
    assert code == 0
    turns, (point,) = of_kind(records, "turn"), of_kind(records, "point")
    # A B A B, and kept in that order.
    assert [turn["side"] for turn in turns] == ["stock", "granikv"] * 3
    assert [turn["repetition"] for turn in turns] == [0, 0, 1, 1, 2, 2]
    comparison = point["comparisons"]["granikv"]
    assert comparison["valid"]
    assert {gate["name"] for gate in comparison["gates"]} == {
        *("output tokens", "finished requests", "outputs", "retractions", "cache state", "clocks")
    }
    middle, low, high = comparison["speedup"]["output_throughput"]
    assert 0 < low <= middle <= high
    assert "output tokens/s" in out and "x (" in out
    for side in point["sides"].values():
        for metric in ("output_throughput", "request_throughput"):
            assert side["metrics"][metric][0] > 0
        for latency in ("ttft", "tpot", "itl"):
            for kind in ("mean", "median", "p99"):
                assert len(side["metrics"][f"{kind}_{latency}_ms"]) == 3
        assert side["metrics"]["output_tokens"] == [24, 24, 24]
    about = point["provenance"]
    assert {"date", "commit", "device", "python", "versions", "replay", "servers"} <= set(about)
    assert about["replay"].startswith("python -m granikv_sglang.bench_serving --dataset-name multi-agent")


def test_both_sides_get_the_same_prompts_and_every_repetition_fresh_ones(compare, servers):
    compare("--warmup-requests", "0")
    stock, granikv = (measured(server) for server in servers)
    assert stock == granikv
    assert len(stock) == 3
    assert all(len(run) == 4 for run in stock)
    prefixes = {tuple(prompt[:64]) for run in stock for prompt in run.values()}
    privates = [tuple(prompt[64:]) for run in stock for prompt in run.values()]
    assert len(prefixes) == 1
    assert len(set(privates)) == len(privates) == 12


def test_the_warm_prefix_is_read_once_on_each_side_before_each_repetition(compare, servers):
    compare("--warmup-requests", "0")
    for server in servers:
        assert server.flushes == 3
        assert [len(prompt) for rid, prompt in server.prompts if not rid] == [64] * 3


@pytest.mark.parametrize(("state", "passes"), [("cold", 3), ("steady", 6)])
def test_cold_and_steady_states(compare, servers, state, passes):
    code, records = compare("--warmup-requests", "0", "--prefix-state", state)
    (point,) = of_kind(records, "point")
    assert point["prefix_state"] == state
    assert [len(measured(server)) for server in servers] == [passes, passes]
    assert all(rid for server in servers for rid, _ in server.prompts)
    if state == "steady":
        assert code == 0


def test_hot_tokens_regimes_and_declines_are_reported(compare, capsys):
    _, records = compare("--warmup-requests", "0")
    (point,) = of_kind(records, "point")
    granikv, stock = point["sides"]["granikv"], point["sides"]["stock"]
    # What the counters grew by: 4 measured requests and 1 for the warm prefix, the latter before the reading.
    assert granikv["regimes"] == {"cascade (memory_bound)": 12}
    assert granikv["declines"] == {"too_short": 12}
    assert granikv["counters"]["promoted_tokens"] == 12 * 64
    assert granikv["metrics"]["hot_hit_tokens"] == [4 * 32] * 3
    assert stock["regimes"] == {} and stock["metrics"]["hot_hit_tokens"] == [0, 0, 0]
    out = capsys.readouterr().out
    assert "12 cascade (memory_bound)" in out and "not promoted: 12 too_short" in out


@pytest.mark.parametrize(
    ("faults", "gate"),
    [
        (Faults(short=True), "output tokens"),
        (Faults(wrong=lambda rid: rid == "team-2"), "outputs"),
        (Faults(retracts=True), "retractions"),
        (Faults(no_cache=True), "cache state"),
        (Faults(ends_stream=True), "finished requests"),
    ],
    ids=["fewer tokens", "other tokens", "retraction", "no cache", "unfinished"],
)
def test_a_failed_gate_is_invalid_and_no_speedup_is_printed(compare, servers, faults, gate, capsys):
    servers[1].faults = faults
    code, records = compare("--warmup-requests", "0")
    out, err = capsys.readouterr()
    assert "granikv: " in err
    if gate == "finished requests":
        # Not one request finishes: there is nothing to compare.
        assert code == 1 and "no request of 4 succeeded" in err
        return
    (point,) = of_kind(records, "point")
    comparison = point["comparisons"]["granikv"]
    assert code == 3
    assert not comparison["valid"] and comparison["speedup"] is None
    assert gate in [g["name"] for g in comparison["gates"] if not g["ok"]]
    assert "INVALID" in out and "INVALID" in err and gate in out
    assert "output tokens/s " not in out.split("INVALID")[1]


def test_a_difference_at_a_logit_tie_is_explained(compare, servers):
    servers[1].faults = Faults(wrong=lambda rid: rid == "team-2", tie=True)
    servers[0].faults = Faults(tie=True)
    code, records = compare("--warmup-requests", "0")
    (point,) = of_kind(records, "point")
    (text,) = [g["text"] for g in point["comparisons"]["granikv"]["gates"] if g["name"] == "outputs"]
    assert code == 0
    assert text == "9 of 12 equal, 3 part at a logit tie"


def test_a_server_that_dies_ends_the_run_with_partial_results(compare, servers, capsys):
    servers[1].faults = Faults(dies_after=12)
    code, records = compare("--warmup-requests", "0")
    err = capsys.readouterr().err
    assert code == 1
    # Five answers a repetition (the warm prefix, four agents): two repetitions of both sides, the third of stock.
    assert [(turn["side"], turn["repetition"]) for turn in of_kind(records, "turn")] == [
        *(("stock", 0), ("granikv", 0), ("stock", 1), ("granikv", 1), ("stock", 2))
    ]
    (broken,) = of_kind(records, "broken")
    assert "granikv, homogeneous 4 x 64, repetition 3" in broken["why"]
    # What came back of that repetition is kept too.
    assert len(broken["requests"]) == 4
    assert sum(request["ok"] for request in broken["requests"]) == 12 - 2 * 5 - 1
    assert "partial results" in err
    assert "Traceback" not in err


def test_no_success_at_all_is_a_clear_error(compare, servers, capsys):
    servers[1].faults = Faults(refuses=True)
    code, _ = compare()
    err = capsys.readouterr().err
    assert code == 1
    assert "no request of 4 succeeded" in err and "the pool is too small" in err
    assert "Traceback" not in err


def test_incremental_streams_and_coarse_chunks_give_the_same_ids(compare, servers):
    servers[1].incremental = True
    code, records = compare("--warmup-requests", "0", "--stream-interval", "4", "--output-details")
    assert code == 0
    lists = [[r["token_ids"] for r in turn["requests"]] for turn in of_kind(records, "turn")[:2]]
    assert lists[0] == lists[1]
    assert {len(ids) for ids in lists[0]} == {6}


def test_without_streaming_no_latency_is_made_up(compare):
    code, records = compare("--disable-stream")
    assert code == 0
    metrics = of_kind(records, "point")[0]["sides"]["stock"]["metrics"]
    assert "mean_ttft_ms" not in metrics and "mean_itl_ms" not in metrics
    assert metrics["output_throughput"][0] > 0


def test_in_rounds_all_sides_read_the_same_answers(compare, servers):
    load = [*LOAD, "--ma-shape", "rounds", "--ma-rounds", "3"]
    servers[1].faults = Faults(wrong=lambda rid: rid.startswith("turn0"), tie=True)
    servers[0].faults = Faults(tie=True)
    code, records = compare("--warmup-requests", "0", load=load)
    stock, granikv = (measured(server) for server in servers)
    assert code == 0
    assert stock == granikv
    last = stock[0]["turn2-0"]
    assert len(last) == 64 + 2 * 4 * 6 + 8
    (point,) = of_kind(records, "point")
    assert point["sides"]["stock"]["metrics"]["output_tokens"][0] == 3 * 4 * 6


def test_the_warm_up_pass_is_short_and_outside_the_measurement(compare, servers):
    compare()
    for server in servers:
        assert len(measured(server)) == 4
        assert server.flushes == 4


def test_a_grid_is_every_combination_and_every_point(compare):
    load = shlex.split("--dataset-name multi-agent --ma-private-len 8 --ma-output-len 4")
    grid = ["--ma-shape", "homogeneous", "--ma-agents", "2", "4", "--ma-prefix-len", "32", "64"]
    point = ["--point", "--ma-shape heterogeneous --ma-groups 2 --ma-agents 4 --ma-prefix-len 64"]
    code, records = compare("--warmup-requests", "0", *point, load=[*load, *grid])
    assert code == 0
    assert [r["point"] for r in of_kind(records, "point")] == [
        *("homogeneous 2 x 32", "homogeneous 4 x 32", "homogeneous 2 x 64", "homogeneous 4 x 64"),
        "heterogeneous 4 x 64",
    ]
    assert len(of_kind(records, "point")[-1]["groups"]) == 2


def test_a_trace_is_replayed_at_its_own_times(servers, tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 400 * i, "input_length": 20, "output_length": 3, "hash_ids": [1, 2 + i]} for i in range(3)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    out = tmp_path / "out.jsonl"
    flags = "--dataset-name trace --trace-block-size 16 --use-trace-timestamps --repetitions 1 --warmup-requests 0"
    argv = [*flags.split(), "--dataset-path", str(path), "--base-url", servers[1].url, "--output-file", str(out)]
    assert main(argv) == 0
    (point,) = of_kind([json.loads(line) for line in out.read_text().splitlines()], "point")
    assert point["sides"]["server"]["metrics"]["seconds"][0] >= 0.8
    assert [len(prompt) for _, prompt in servers[1].prompts] == [20] * 3
    assert "comparisons" not in point


def test_a_report_is_made_again_from_the_lines(compare, tmp_path, capsys):
    compare("--warmup-requests", "0")
    first = capsys.readouterr().out.split("\nJSON lines")[0]
    page = tmp_path / "page"
    assert main(["--report-from", str(tmp_path / "out.jsonl"), "--report", str(page)]) == 0
    again = capsys.readouterr().out
    assert first.strip() in again
    assert (page / "index.html").exists()


def test_a_server_of_the_wrong_kind_is_refused(servers, tmp_path, capsys):
    stock, granikv = servers
    for baseline, ours, word in ((granikv, granikv, "stock"), (stock, stock, "GraniKV")):
        urls = ["--compare", baseline.url, "--base-url", ours.url, "--output-file", str(tmp_path / "out.jsonl")]
        assert main([*LOAD, *urls]) == 1
        assert f"does not run {word}" in capsys.readouterr().err
    assert not stock.prompts and not granikv.prompts


@pytest.fixture
def launched(monkeypatch):
    """Stand-ins in place of server processes; what was started and stopped, in order."""
    events = []

    class Process:
        def __init__(self, name, _port, args, _folder):
            self.name, self._fake = name, FakeServer(granikv="--granikv-off" not in args).start()
            events.append(("start", name))

        @property
        def url(self):
            return self._fake.url

        def stop(self):
            events.append(("stop", self.name))
            self._fake.stop()

        def last_words(self):
            return ""

    monkeypatch.setattr(sides, "Server", Process)
    monkeypatch.setattr(
        sides, "wait_ready", lambda servers, _on_wait: events.extend(("ready", s.name) for s in servers)
    )
    return events


@pytest.mark.parametrize(("gpu", "pool"), [(False, ""), (True, ""), (True, "--max-total-tokens 9000")])
def test_compare_stock_starts_both_and_stops_both(launched, gpu, pool, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "has_gpu", lambda: gpu)
    monkeypatch.setattr(machine, "_device", lambda: "a device")
    monkeypatch.setattr(machine.Clocks, "__enter__", lambda clocks: clocks)
    monkeypatch.setattr(machine.Clocks, "__exit__", lambda clocks, *_: clocks.summary.update(sm_mhz=1.0))
    argv = [
        *LOAD,
        "--compare",
        "stock",
        "--model",
        "/m",
        "--variant",
        "other=--x",
        "--output-file",
        str(tmp_path / "o"),
        f"--args-both={pool}",
    ]
    assert main(argv) == 0
    started = ["stock", "granikv", "other"]
    if gpu and not pool:  # each sizes its pool by what the one before left
        assert launched[:6] == [event for name in started for event in (("start", name), ("ready", name))]
    else:
        assert launched[:3] == [("start", name) for name in started]
    assert sorted(launched[6:]) == sorted(("stop", name) for name in started)
    points = of_kind([json.loads(line) for line in (tmp_path / "o").read_text().splitlines()], "point")
    assert set(points[0]["comparisons"]) == {"granikv", "other"}


def test_collectors_are_frozen_once_on_each_side(compare, servers):
    stock, granikv = servers
    stock.faults.old = True
    code, records = compare("--ma-prefix-len", "64", "96")
    assert code == 0 and (stock.frozen, granikv.frozen) == (0, 1)
    for point in of_kind(records, "point"):
        assert point["provenance"]["collectors"] == {"stock": "as it is", "granikv": "frozen"}


def test_one_at_a_time_never_has_two_up(launched, tmp_path):
    argv = [*LOAD, "--compare", "stock", "--model", "/m", "--one-at-a-time", "--output-file", str(tmp_path / "o")]
    assert main(argv) == 0
    up = set()
    for event, name in launched:
        if event == "start":
            up.add(name)
        elif event == "stop":
            up.discard(name)
        assert len(up) <= 1
    assert [name for event, name in launched if event == "start"] == ["stock", "granikv"] * 3


def test_the_clients_own_collector_rests_while_it_measures(compare, servers, monkeypatch):
    """A pass over what SGLang's imports have made takes 0.4 s, on whichever side it falls."""
    states = []
    kept = runner.drive

    def drive(*args):
        states.append((gc.isenabled(), gc.get_freeze_count() > 100_000))
        kept(*args)

    monkeypatch.setattr(runner, "drive", drive)
    assert compare()[0] == 0
    assert states and set(states) == {(False, True)}
    assert gc.isenabled()
    servers[1].faults.dies_after = 0
    assert compare()[0] == 1
    assert gc.isenabled()
    gc.unfreeze()
