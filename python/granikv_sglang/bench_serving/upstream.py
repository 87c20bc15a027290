"""Where SGLang's own benchmark is used: its command line, its datasets, its load generator, its metrics.

One name of SGLang is replaced for a moment, in this client process only: its command line is built inside one function,
so the parser class it uses is ours while that function runs, and hands the finished parser out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

import numpy as np
import requests
from sglang.benchmark import serving
from sglang.benchmark.datasets import DatasetRow, get_dataset

from granikv_sglang.bench_serving.id_requests import IdOutput, IdRequests, IdTokenizer
from granikv_sglang.bench_serving.workload import Ask
from granikv_sglang.core import GraniKVError

BACKEND = "sglang-ids"
"""Name of our request function in SGLang's table of backends. SGLang asks for /server_info where it has 'sglang'."""
PROG = "python -m granikv_sglang.bench_serving"


class _Found(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


class _Parser(argparse.ArgumentParser):
    def parse_args(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise _Found(self)

    def error(self, message: str) -> NoReturn:
        raise GraniKVError(f"{message} (--help lists all flags)")


def parser_of_sglang() -> argparse.ArgumentParser:
    """The parser of ``sglang.bench_serving`` with every flag it has; a bad value raises GraniKVError, one line.

    Parse with :func:`parse`.
    """
    original = serving.ArgumentParser
    serving.ArgumentParser = _Parser
    try:
        serving.cli_main()
    except _Found as found:
        found.parser.prog = PROG
        return found.parser
    finally:
        serving.ArgumentParser = original
    raise GraniKVError("SGLang's bench_serving did not build its command line; this SGLang is not the supported one")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse with SGLang's parser and its own checks between flags. Raises GraniKVError."""
    options = argparse.ArgumentParser.parse_args(parser, list(argv))
    serving._validate_parsed_gsp_args(parser, options)
    return options


def offer_datasets(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Let ``--dataset-name`` take more names."""
    action = next(action for action in parser._actions if action.dest == "dataset_name")
    action.choices = [*(action.choices or ()), *names]


def run_stock(options: argparse.Namespace) -> dict[str, Any]:
    """SGLang's benchmark as it is. Raises GraniKVError when no request succeeds or the server goes away."""
    seen: list[Any] = []
    original = serving.ASYNC_REQUEST_FUNCS[options.backend]

    async def recording(request_func_input: Any, pbar: Any = None) -> Any:
        output = await original(request_func_input=request_func_input, pbar=pbar)
        seen.append(output)
        return output

    serving.ASYNC_REQUEST_FUNCS[options.backend] = recording
    try:
        result = serving.run_benchmark(options)
    except (requests.RequestException, ValueError, IndexError, AssertionError, OSError) as error:
        done = [output for output in seen if output.success]
        kept = _keep_partial(options, done, seen) if done else ""
        raise GraniKVError(_stock_failure(error, done, seen) + kept) from error
    finally:
        serving.ASYNC_REQUEST_FUNCS[options.backend] = original
    if result["completed"] == 0:
        raise GraniKVError(_stock_failure(None, [], seen))
    return dict(result)


def _keep_partial(options: argparse.Namespace, done: Sequence[Any], seen: Sequence[Any]) -> str:
    """SGLang writes its line at the end only: write what finished before a run broke off; says where."""
    path = options.output_file or f"{options.backend}_{options.dataset_name}_partial.jsonl"
    line = {
        "partial": True,
        "dataset_name": options.dataset_name,
        "completed": len(done),
        "total_output_tokens": sum(output.output_len for output in done),
        "latencies": [output.latency for output in done],
        "ttfts": [output.ttft for output in done],
        "errors": sorted({output.error.strip().splitlines()[-1][:300] for output in seen if output.error}),
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return f"; partial results: {path}"


def _stock_failure(error: BaseException | None, done: Sequence[Any], seen: Sequence[Any]) -> str:
    failed = [output.error for output in seen if not output.success]
    why = (failed or [str(error) or type(error).__name__])[0].strip().splitlines()[-1][:300]
    if seen and not done:
        return f"no request succeeded ({len(seen)} failed); the first error: {why}"
    if failed:
        tokens = sum(output.output_len for output in done)
        return f"the server went away: {len(done)} requests with {tokens} output tokens had finished; {why}"
    return f"SGLang's bench_serving stopped: {why}"


def rows_of(options: argparse.Namespace, tokenizer: str, seed: int) -> list[DatasetRow]:
    """Rows of one of SGLang's own datasets, drawn with ``seed``. Raises GraniKVError where it has no plain prompts."""
    random.seed(seed)
    np.random.seed(seed)
    options = argparse.Namespace(**{**vars(options), "seed": seed})
    try:
        rows = get_dataset(options, serving.get_tokenizer(tokenizer), options.model)
    except (OSError, ValueError, AssertionError, KeyError) as error:
        raise GraniKVError(f"--dataset-name {options.dataset_name} cannot be loaded: {error}") from error
    if not rows or not all(isinstance(row, DatasetRow) and _plain(row.prompt) for row in rows):
        raise GraniKVError(f"--compare cannot replay --dataset-name {options.dataset_name}: its prompts are dialogues")
    return list(rows)


def _plain(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(token, int) for token in prompt))


def drive(options: argparse.Namespace, url: str, asks: Sequence[Ask], requester: IdRequests, log: TextIO) -> None:
    """Let SGLang's load generator send ``asks``; their records gather in ``requester.outputs``.

    Raises GraniKVError when the server goes away or no request succeeds; the records made so far stay.
    """
    rows = [
        DatasetRow(
            prompt=ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt),
            prompt_len=ask.prompt_len,
            output_len=ask.output_len,
            timestamp=ask.at_ms,
            extra_request_body={"rid": ask.rid},
        )
        for ask in asks
    ]
    serving.set_global_args(options)
    # SGLang draws arrival times from these two: the same on every side.
    random.seed(options.seed)
    np.random.seed(options.seed)
    serving.ASYNC_REQUEST_FUNCS[BACKEND] = requester
    before = len(requester.outputs)
    try:
        with contextlib.redirect_stdout(log):
            serving.set_ulimit()
            asyncio.run(_benchmark(options, url, rows))
    except (requests.RequestException, ValueError, IndexError, OSError) as error:
        raise GraniKVError(_failure(requester.outputs[before:], len(asks), error)) from error
    finally:
        del serving.ASYNC_REQUEST_FUNCS[BACKEND]
    if not any(output.success for output in requester.outputs[before:]):
        raise GraniKVError(_failure(requester.outputs[before:], len(asks), None))


def _failure(outputs: Sequence[IdOutput], asked: int, error: BaseException | None) -> str:
    done = sum(output.success for output in outputs)
    first = next((output.error for output in outputs if not output.success), "") or str(error or "no answer came")
    if done == 0:
        return f"no request of {asked} succeeded; the first error: {first.splitlines()[0][:300]}"
    return f"the server went away with {done} of {asked} requests finished; {first.splitlines()[0][:300]}"


async def _benchmark(options: argparse.Namespace, url: str, rows: list[DatasetRow]) -> None:
    await serving.benchmark(
        backend=BACKEND,
        api_url=f"{url}/generate",
        base_url=url,
        model_id=options.served_model_name or options.model or "default",
        tokenizer=IdTokenizer(),
        input_requests=rows,
        # A trace brings its own arrival times; the request function waits for them.
        request_rate=float("inf") if options.use_trace_timestamps else options.request_rate,
        max_concurrency=options.max_concurrency,
        disable_tqdm=True,
        lora_names=options.lora_name,
        lora_request_distribution=options.lora_request_distribution if options.lora_name else None,
        lora_zipf_alpha=options.lora_zipf_alpha,
        extra_request_body=json.loads(options.extra_request_body or "{}"),
        profile=options.profile,
        # Warm-up is ours: SGLang's would put the first request's private part into the cache.
        warmup_requests=0,
    )


def metrics_of(asks: Sequence[Ask], outputs: Sequence[IdOutput], seconds: float) -> Any:
    """SGLang's metrics over ``outputs`` (a record of each of ``asks``, in any order) and a duration in seconds."""
    rows = {ask.rid: DatasetRow(prompt="", prompt_len=ask.prompt_len, output_len=ask.output_len) for ask in asks}
    inputs = [rows[output.rid] for output in outputs]
    metrics, _ = serving.calculate_metrics(inputs, list(outputs), seconds, IdTokenizer(), BACKEND)
    return metrics
