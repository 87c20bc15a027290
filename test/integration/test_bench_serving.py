"""The serving benchmark on real servers: SGLang's own datasets, a short comparison, a trace."""

from __future__ import annotations

import json
import shlex

import pytest

from granikv_sglang.bench_serving.__main__ import main
from support.fake_server import FakeServer


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "flags",
    [
        "--dataset-name random-ids --num-prompts 3 --random-input-len 24 --random-output-len 4 --random-range-ratio 1",
        "--dataset-name random-ids --num-prompts 2 --random-input-len 12 --random-output-len 4 --random-range-ratio 1 "
        "--tokenize-prompt --request-rate 20 --max-concurrency 1 --cache-report",
        "--dataset-name generated-shared-prefix --gsp-num-groups 1 --gsp-prompts-per-group 3 --gsp-system-prompt-len "
        "40 --gsp-question-len 8 --gsp-output-len 4 --backend sglang-oai",
    ],
    ids=["random-ids", "tokenized", "shared prefix over the OpenAI endpoint"],
)
def test_sglangs_benchmark_runs_as_ever(flags, granikv, tmp_path, capfd):
    out = tmp_path / "out.jsonl"
    argv = [*shlex.split(flags), "--base-url", granikv.url, "--output-file", str(out), "--disable-tqdm"]
    assert main(argv) == 0
    (line,) = lines_of(out)
    assert line["completed"] >= 2
    assert line["output_throughput"] > 0
    assert "Serving Benchmark Result" in capfd.readouterr().out


def test_sglangs_datasets_can_be_compared_too(model, tmp_path):
    """Between stand-ins: what matters is that both get the same prompts, and every repetition others."""
    servers = FakeServer().start(), FakeServer(granikv=True).start()
    flags = "--dataset-name random-ids --tokenize-prompt --num-prompts 3 --random-input-len 20 --random-output-len 4"
    urls = ["--compare", servers[0].url, "--base-url", servers[1].url, "--output-file", str(tmp_path / "out")]
    try:
        code = main([*shlex.split(flags), "--random-range-ratio", "1", "--tokenizer", str(model), *urls])
    finally:
        for server in servers:
            server.stop()
    assert code == 0
    (point,) = [record for record in lines_of(tmp_path / "out") if record["kind"] == "point"]
    assert (point["prefix_state"], point["comparisons"]["granikv"]["valid"]) == ("cold", True)
    stock, granikv = (sorted(tuple(prompt) for _, prompt in server.prompts) for server in servers)
    assert stock == granikv
    # A warm-up and three repetitions of three prompts of 20 tokens.
    assert len(set(stock)) == 12
    assert {len(prompt) for prompt in stock} == {20}


def test_a_short_comparison_from_start_to_page(model, tmp_path, capsys, monkeypatch):
    """What `make bench-smoke` does, smaller; without a tokenizer on either side, as on a host that has none."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    page = tmp_path / "page"
    flags = (
        "--dataset-name multi-agent --compare stock --ma-agents 2 3 --ma-prefix-len 128 --ma-private-len 8 "
        "--ma-output-len 8 --warmup-requests 0 --args-granikv='--granikv-min-tokens 64' "
        "--args-both='--dtype float32 --max-total-tokens 8192 --skip-tokenizer-init'"
    )
    code = main([*shlex.split(flags), "--model", str(model), "--report", str(page)])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    records = lines_of(page / "results.jsonl")
    points = [record for record in records if record["kind"] == "point"]
    assert [point["agents"] for point in points] == [2, 3]
    assert len(records) == 2 + 2 * 2 * 3
    for point in points:
        comparison = point["comparisons"]["granikv"]
        assert comparison["valid"]
        assert comparison["speedup"]["output_throughput"][0] > 0
        ours, stock = point["sides"]["granikv"], point["sides"]["stock"]
        # A warm prefix: all but the private part was found, on both sides.
        assert ours["metrics"]["cached_tokens"] == stock["metrics"]["cached_tokens"] == [128 * point["agents"]] * 3
        assert ours["counters"]["promotions"] >= 1
        assert sum(count for regime, count in ours["regimes"].items() if not regime.startswith("uniform")) > 0
        assert ours["counters"]["bytes_not_reread"] > 0
        assert stock["regimes"] == {}
        for latency in ("ttft", "tpot", "itl"):
            low, high = (ours["metrics"][f"{kind}_{latency}_ms"][0] for kind in ("median", "p99"))
            assert 0 < low <= high
    assert (page / "index.html").exists() and (page / "throughput_by_batch.png").exists()
    assert "output tokens/s" in out


def test_retraction_on_one_side_is_invalid(granikv, stock, tmp_path, capsys):
    """The session's GraniKV server is made to retract every few passes; the stock one never has to."""
    flags = "--dataset-name multi-agent --ma-agents 4 --ma-prefix-len 96 --ma-private-len 8 --ma-output-len 24"
    out = tmp_path / "out.jsonl"
    urls = ["--compare", stock.url, "--base-url", granikv.url, "--output-file", str(out), "--warmup-requests", "0"]
    assert main([*shlex.split(flags), *urls]) == 3
    (point,) = [record for record in lines_of(out) if record["kind"] == "point"]
    failed = {gate["name"] for gate in point["comparisons"]["granikv"]["gates"] if not gate["ok"]}
    assert "retractions" in failed
    assert "outputs" not in failed
    assert point["comparisons"]["granikv"]["speedup"] is None
    assert "INVALID" in capsys.readouterr().err


def test_a_trace_is_replayed_with_exact_lengths(granikv, tmp_path):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"timestamp": 50 * i, "input_length": 520 + i, "output_length": 4, "hash_ids": [7, 8 + i]} for i in range(3)
    ]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    flags = "--dataset-name trace --repetitions 1 --use-trace-timestamps --warmup-requests 0"
    argv = [*shlex.split(flags), "--dataset-path", str(trace), "--base-url", granikv.url, "--output-file", str(out)]
    assert main(argv) == 0
    (point,) = [record for record in lines_of(out) if record["kind"] == "point"]
    metrics = point["sides"]["server"]["metrics"]
    assert metrics["output_tokens"][0] == 12
    # The second and third prompt find the first one's block of 512 tokens.
    assert metrics["cached_tokens"][0] >= 512
