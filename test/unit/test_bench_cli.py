"""The command line: SGLang's flags all stay, ours are added, everything wrong is one line that names the flag."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex

import pytest
from sglang.benchmark import serving
from sglang.benchmark.datasets import DATASET_MAPPING

from granikv_sglang.bench_serving import app, flags, upstream
from granikv_sglang.bench_serving.__main__ import main
from granikv_sglang.core import GraniKVError


@pytest.fixture(scope="module")
def stock_parser() -> argparse.ArgumentParser:
    return upstream.parser_of_sglang()


def test_every_flag_of_sglang_keeps_its_meaning(stock_parser):
    ours = upstream.parser_of_sglang()
    upstream.offer_datasets(ours, (flags.MULTI_AGENT, flags.TRACE))
    flags.add_flags(ours)
    theirs = {option: action for action in stock_parser._actions for option in action.option_strings}
    mine = {option: action for action in ours._actions for option in action.option_strings}
    assert len(theirs) > 60
    for option, action in theirs.items():
        assert mine[option].dest == action.dest
        assert mine[option].default == action.default
        assert mine[option].type == action.type
    defaults = vars(upstream.parse(ours, []))
    assert {key: defaults[key] for key in vars(upstream.parse(stock_parser, []))} == vars(
        upstream.parse(stock_parser, [])
    )


def test_every_dataset_of_sglang_is_still_accepted():
    for name in DATASET_MAPPING:
        assert app.parsed(["--dataset-name", name]).dataset_name == name


def test_the_parser_of_sglang_is_put_back():
    upstream.parser_of_sglang()
    assert serving.ArgumentParser is argparse.ArgumentParser


def test_a_stock_dataset_runs_sglangs_benchmark_with_its_own_options(monkeypatch):
    seen = []
    monkeypatch.setattr(serving, "run_benchmark", lambda options: seen.append(options) or {"completed": 3})
    assert (
        main(shlex.split("--dataset-name random-ids --num-prompts 3 --random-input-len 7 --tag x --request-rate 2"))
        == 0
    )
    (options,) = seen
    assert (options.dataset_name, options.num_prompts, options.random_input_len) == ("random-ids", 3, 7)
    assert (options.tag, options.request_rate) == ("x", 2.0)


def test_a_stock_run_without_a_success_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(serving, "run_benchmark", lambda _options: {"completed": 0})
    assert main(["--dataset-name", "random-ids"]) == 1
    assert "granikv: " in capsys.readouterr().err


def test_a_stock_run_that_breaks_off_keeps_what_had_finished(monkeypatch, capsys, tmp_path):
    def breaks(options):
        async def answer(request_func_input, pbar=None):
            return serving.RequestFuncOutput(success=request_func_input, output_len=5, error="connection refused")

        async def two():
            for good in (True, False):
                await serving.ASYNC_REQUEST_FUNCS[options.backend](request_func_input=good)

        serving.ASYNC_REQUEST_FUNCS[options.backend]  # the wrapper is in the table
        monkeypatch.setitem(_inner, "f", answer)
        asyncio.run(two())
        raise ValueError("server is gone")

    _inner = {"f": None}

    async def through(request_func_input, pbar=None):
        return await _inner["f"](request_func_input, pbar)

    monkeypatch.setitem(serving.ASYNC_REQUEST_FUNCS, "sglang", through)
    monkeypatch.setattr(serving, "run_benchmark", breaks)
    assert main(["--dataset-name", "random-ids", "--output-file", str(tmp_path / "out")]) == 1
    line = json.loads((tmp_path / "out").read_text())
    assert (line["partial"], line["completed"], line["total_output_tokens"]) == (True, 1, 5)
    err = capsys.readouterr().err
    assert "1 requests with 5 output tokens had finished" in err
    assert serving.ASYNC_REQUEST_FUNCS["sglang"] is through


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("--dataset-name nope", "--dataset-name"),
        ("--num-prompts many", "--num-prompts"),
        ("--no-such-flag", "--no-such-flag"),
        ("--gsp-group-distribution zipf", "--gsp-zipf-alpha"),
        ("--dataset-name multi-agent --ma-shape blob", "--ma-shape"),
        ("--dataset-name multi-agent --ma-agents 0", "--ma-agents"),
        ("--dataset-name multi-agent --compare there", "--compare"),
        ("--dataset-name multi-agent --compare stock --port 1", "--port"),
        ("--dataset-name multi-agent --compare stock --repetitions 2", "--repetitions"),
        ("--dataset-name multi-agent --compare stock --temperature 1", "--temperature"),
        ("--dataset-name multi-agent --compare http://x --args-both=--tp", "--args-*"),
        ("--dataset-name multi-agent --backend vllm", "--backend"),
        ("--dataset-name multi-agent --point '--ma-shape none' --point '--ma-shape none'", "--point"),
        ("--dataset-name multi-agent --point '--seed 3'", "--point"),
        ("--dataset-name multi-agent --stream-interval 0", "--stream-interval"),
        ("--dataset-name multi-agent --extra-request-body {", "--extra-request-body"),
        ("--dataset-name multi-agent --variant x", "--variant"),
        ("--dataset-name multi-agent --compare stock --variant stock=--x", "--variant"),
        ("--dataset-name trace", "--dataset-path"),
        ("--dataset-name trace --dataset-path /nowhere", "--dataset-path"),
        ("--dataset-name trace --dataset-path x --prefix-state warm", "--prefix-state"),
        ("--dataset-name random-ids --report x", "--report"),
        ("--dataset-name random-ids --point x --compare stock", "--point"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(line, word, capsys):
    assert main(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    lines = [text for text in err.splitlines() if text.strip()]
    assert len(lines) == 1 and lines[0].startswith("granikv: ") and word in lines[0], err
    assert "usage" not in out


def test_report_from_what_is_no_results_file(tmp_path, capsys):
    (tmp_path / "x").write_text("{}\n")
    for path in (tmp_path / "x", tmp_path / "nothing"):
        assert main(["--report-from", str(path)]) == 1
        assert "no results file" in capsys.readouterr().err


def test_sides_of_a_comparison_with_stock():
    line = "--dataset-name multi-agent --compare stock --model /m --args-both '--tp 2' --args-granikv=--granikv-audit"
    options = app.parsed([*shlex.split(line), "--args-stock=--x 1", "--variant", "gemm=--granikv-regime batched_gemm"])
    stock, ours, variant = app.side_specs(options)
    both = ("--model-path", "/m", "--tp", "2")
    assert (stock.name, stock.args) == ("stock", (*both, "--x", "1", "--granikv-off"))
    assert (ours.name, ours.args) == ("granikv", (*both, "--granikv-audit"))
    assert variant.args == (*both, "--granikv-audit", "--granikv-regime", "batched_gemm")


def test_points_take_the_other_flags_from_the_command_line():
    options = app.parsed(
        shlex.split("--dataset-name multi-agent --ma-output-len 9 --seed 5 --point '--ma-shape none --ma-agents 3'")
    )
    (spec,) = flags.specs_of(options)
    assert (spec.shape, spec.agents, spec.output, spec.seed) == ("none", 3, 9, 5)


def test_help_names_both(capsys):
    with pytest.raises(SystemExit):
        app.parsed(["--help"])
    out = capsys.readouterr().out
    assert "--ma-shape" in out and "--gsp-num-groups" in out and "--compare" in out


@pytest.mark.parametrize(("file", "why"), [("here", "its prompts are dialogues"), ("nowhere", "cannot be loaded")])
def test_a_dataset_of_dialogues_cannot_be_compared(file, why, tmp_path, monkeypatch):
    (tmp_path / "here").write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n')
    monkeypatch.setattr(serving, "get_tokenizer", lambda _name: None)
    options = app.parsed(["--dataset-name", "mooncake", "--compare", "stock", "--dataset-path", str(tmp_path / file)])
    with pytest.raises(GraniKVError, match=f"--dataset-name mooncake.*{why}"):
        upstream.rows_of(options, "a tokenizer", 1)
