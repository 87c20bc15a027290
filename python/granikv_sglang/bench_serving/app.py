"""The program: from a checked command line to servers, turns, verdict and report."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.utils.network import resolve_base_url

from granikv_sglang.bench_serving import machine, results, trace, upstream
from granikv_sglang.bench_serving.flags import MULTI_AGENT, TRACE, add_flags, check, specs_of, variants_of, words_of
from granikv_sglang.bench_serving.gates import Gate, judge_all
from granikv_sglang.bench_serving.runner import Point, Runner, Settings, scratch, steps_of
from granikv_sglang.bench_serving.shapes import MultiAgent, build
from granikv_sglang.bench_serving.sides import Side, SideSpec, start_all, stop_all
from granikv_sglang.bench_serving.workload import Ask, Vocabulary, Workload, one_turn
from granikv_sglang.core import GraniKVError
from granikv_sglang.demo.progress import Progress

INVALID = 3
"""Exit code when a validity gate failed."""
GRANIKV, STOCK = "granikv", "stock"
_START = 5
"""Steps of the progress bar that starting one server stands for."""


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, checked. Raises GraniKVError with one line on anything wrong."""
    parser = upstream.parser_of_sglang()
    upstream.offer_datasets(parser, (MULTI_AGENT, TRACE))
    add_flags(parser)
    options = upstream.parse(parser, argv)
    if not options.report_from:
        check(options)
    if options.report is not None:
        _require_plots()
    if options.extra_request_body:
        try:
            json.loads(options.extra_request_body)
        except ValueError as error:
            raise GraniKVError(f"--extra-request-body is not JSON: {error}") from error
    return options


@dataclass(frozen=True)
class Job:
    """A command line that has been checked as far as it can be before anything starts."""

    options: argparse.Namespace
    argv: tuple[str, ...]
    sides: tuple[SideSpec, ...] = ()
    points: tuple[Point, ...] = ()


def planned(argv: Sequence[str]) -> Job:
    """What a command line asks for. Raises GraniKVError with one line on anything wrong with it."""
    options = parsed(argv)
    if options.report_from or (options.dataset_name not in (MULTI_AGENT, TRACE) and options.compare is None):
        return Job(options, tuple(argv))
    return Job(options, tuple(argv), tuple(side_specs(options)), tuple(points_of(options)))


def run(job: Job) -> int:
    """Run the benchmark; returns the exit code. Raises GraniKVError."""
    if job.options.report_from:
        return report_only(job.options)
    if not job.points:
        upstream.run_stock(job.options)
        return 0
    return measured(job)


def report_only(options: argparse.Namespace) -> int:
    """Table and page of results that exist."""
    records = results.load(options.report_from)
    print(results.table(records))
    if options.report is not None:
        _page(records, options.report)
    return _verdict(records)


def measured(job: Job) -> int:
    """Measure every point on every side, keep results as they come, report."""
    options, points = job.options, job.points
    about = machine.provenance(job.argv)
    folder = Path(tempfile.mkdtemp(prefix="granikv-bench-"))
    lines = results.Lines(_output_file(options), options.output_details)
    gpu = machine.has_gpu()
    sides = [Side(spec, folder) for spec in job.sides]
    keep_logs = True
    try:
        total = _START * len(sides) + steps_of(len(points), len(sides), options.repetitions)
        with Progress(total) as progress, scratch(folder) as log:
            progress.phase("starting the servers")
            if not options.one_at_a_time:
                fixed = "--max-total-tokens" in words_of(options, "args_both")
                start_all(sides, lambda _new: progress.tick(), one_by_one=gpu and not fixed)
            else:
                sides[0].up(lambda _new: progress.tick())
            progress.advance(_START * len(sides))
            about["servers"] = {side.name: {"args": side.command, **_info(side, options)} for side in sides}
            if options.tag is not None:
                about["tag"] = options.tag
            if options.compare is not None:
                _same_model(about["servers"])
                _right_kinds(sides, options)
            settings = Settings(
                options,
                options.repetitions,
                _tie_bound(options, about["servers"]),
                options.stream_interval,
                options.one_at_a_time,
                gpu,
            )
            runner = Runner(sides, settings, progress, lines, log)
            records = _all_points(points, runner, lines, about)
            progress.finish()
        keep_logs = any(record["kind"] == "broken" for record in records)
    except GraniKVError as error:
        raise GraniKVError(f"{error}\ngranikv: logs: {folder}") from error
    finally:
        stop_all(sides)
        if not keep_logs:
            shutil.rmtree(folder, ignore_errors=True)
    print(results.table(records))
    print(f"\nJSON lines: {lines.path}")
    if options.report is not None:
        _page(records, options.report)
    if keep_logs:
        print(f"granikv: the run broke off; partial results: {lines.path}; logs: {folder}", file=sys.stderr)
        return 1
    return _verdict(records)


def _all_points(
    points: Sequence[Point], runner: Runner, lines: results.Lines, about: dict[str, Any]
) -> list[dict[str, Any]]:
    """A record of each point; a server that goes away ends the run with what there is."""
    exact = not runner.settings.options.disable_ignore_eos
    records: list[dict[str, Any]] = []
    for point in points:
        try:
            turns, partings = runner.measure(point)
        except GraniKVError as error:
            print(f"granikv: {error}", file=sys.stderr)
            records.append(results.broken_record(point, error, {**about, "collectors": runner.collectors}))
            lines.add(records[-1])
            break
        gates: dict[str, list[Gate]] = {}
        for side, parted in zip(turns[1:], partings, strict=True):
            gates[side[0].side] = judge_all(side, turns[0], parted, exact_lengths=exact)
        records.append(results.point_record(point, turns, gates, {**about, "collectors": runner.collectors}))
        lines.add(records[-1])
    return records


def side_specs(options: argparse.Namespace) -> list[SideSpec]:
    """The sides, baseline first. Without ``--compare`` there is one: the server that runs."""
    ours = resolve_base_url(options.base_url, options.host, options.port or 30000)
    if options.compare is None:
        return [SideSpec("server", url=ours)]
    if options.compare != "stock":
        return [SideSpec(STOCK, url=options.compare.rstrip("/")), SideSpec(GRANIKV, url=ours)]
    model = ("--model-path", options.model) if options.model else ()
    both, own = (*model, *words_of(options, "args_both")), words_of(options, "args_granikv")
    stock = SideSpec(STOCK, (*both, *words_of(options, "args_stock"), "--granikv-off"))
    variants = [SideSpec(name, (*both, *own, *args)) for name, args in variants_of(options)]
    return [stock, SideSpec(GRANIKV, (*both, *own)), *variants]


def points_of(options: argparse.Namespace) -> list[Point]:
    """The loads to measure. Raises GraniKVError on a load that cannot be built, before any server is started."""
    if options.dataset_name == MULTI_AGENT:
        points = [_multi_agent(spec, options.prefix_state or "warm") for spec in specs_of(options)]
    elif options.dataset_name == TRACE:
        points = [_trace(options)]
    else:
        points = [_upstream(options)]
    for point in points:
        point.load(0)
    return points


def _multi_agent(spec: MultiAgent, state: str) -> Point:
    facts = {
        "dataset": MULTI_AGENT,
        "shape": spec.shape,
        "agents": spec.agents,
        "prefix_tokens": spec.prefix,
        "private_tokens": spec.private,
        "output_tokens": spec.output,
        "groups": list(build(spec, 0).groups),
    }
    return Point(spec.label, lambda repetition: build(spec, repetition), facts, state)


def _trace(options: argparse.Namespace) -> Point:
    read = trace.read(
        Path(options.dataset_path),
        limit=options.num_prompts,
        block_size=options.trace_block_size,
        skip_broken=options.trace_skip_broken,
    )
    if read.skipped:
        number, why = read.skipped[0]
        print(
            f"granikv: {len(read.skipped)} broken lines of the trace left out; first, line {number}: {why}",
            file=sys.stderr,
        )

    vocab = Vocabulary(options.ma_vocab).stop

    def load(repetition: int) -> Workload:
        return trace.workload(read, options.seed, repetition, vocab)

    facts = {"dataset": TRACE, "requests": len(read.records), "broken_lines": len(read.skipped)}
    facts |= {"groups": list(load(0).groups)}
    return Point(f"trace {read.path.name}", load, facts, options.prefix_state or "cold")


def _upstream(options: argparse.Namespace) -> Point:
    """One of SGLang's own datasets, drawn with another seed in every repetition."""
    tokenizer = options.tokenizer or options.model
    if tokenizer is None:
        from granikv_sglang.embedded import ensure_model  # noqa: PLC0415  (transformers: seconds)

        tokenizer = str(ensure_model())

    def load(repetition: int) -> Workload:
        asks = [
            Ask(
                f"row-{number}",
                options.dataset_name,
                row.prompt if isinstance(row.prompt, str) else tuple(row.prompt),
                row.prompt_len,
                row.output_len,
            )
            for number, row in enumerate(upstream.rows_of(options, tokenizer, options.seed + 1000 * (repetition + 10)))
        ]
        return Workload((), one_turn(asks), ())

    facts = {"dataset": options.dataset_name, "groups": []}
    return Point(options.dataset_name, load, facts, options.prefix_state or "cold")


def _info(side: Side, options: argparse.Namespace) -> dict[str, Any]:
    """What a server says of itself; with one server at a time the others are not asked, their arguments are known."""
    if options.one_at_a_time and side.starts == 0:
        return {}
    return side.info()


def _same_model(servers: dict[str, dict[str, Any]]) -> None:
    models = {name: info["model_path"] for name, info in servers.items() if "model_path" in info}
    if len(set(models.values())) > 1:
        told = ", ".join(f"{name} {model}" for name, model in models.items())
        raise GraniKVError(f"the servers serve different models: {told}; --compare needs the same one")


def _right_kinds(sides: Sequence[Side], options: argparse.Namespace) -> None:
    """The baseline is stock and every other side is GraniKV, or the comparison means something else."""
    for place, side in enumerate(sides):
        if options.one_at_a_time and side.starts == 0:
            continue
        if bool(side.state()) is (place == 0):
            wanted = "stock SGLang (--granikv-off)" if place == 0 else "GraniKV"
            raise GraniKVError(
                f"the {side.name} server at {side.url} does not run {wanted}; see --compare and --base-url"
            )


def _tie_bound(options: argparse.Namespace, servers: dict[str, dict[str, Any]]) -> float:
    if options.tie_bound is not None:
        return float(options.tie_bound)
    info = next(iter(servers.values()))
    # auto is float32 on a CPU (GraniKV's platform says so) and the checkpoint's 16 bits on a GPU.
    exact = info.get("dtype") == "float32" or (info.get("dtype") == "auto" and info.get("device") == "cpu")
    return 1e-3 if exact else 0.2


def _output_file(options: argparse.Namespace) -> Path:
    if options.output_file:
        path = Path(options.output_file)
    elif options.report is not None:
        path = options.report / "results.jsonl"
    else:
        path = Path(f"granikv_{time.strftime('%m%d')}_{options.dataset_name}.jsonl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise GraniKVError(f"--output-file {path} cannot be written: {error.strerror}") from error
    return path


def _require_plots() -> None:
    try:
        import matplotlib  # noqa: F401, PLC0415  (an extra: a measuring host may lack it)
    except ImportError as error:
        raise GraniKVError(
            "--report needs matplotlib (pip install 'granikv-sglang[bench]'); or measure with --output-file FILE and "
            "make the report elsewhere with --report-from FILE"
        ) from error


def _page(records: Sequence[dict[str, Any]], folder: Path) -> None:
    from granikv_sglang.bench_serving.page import write_report  # noqa: PLC0415  (needs matplotlib)

    print(f"report: {write_report(records, folder)}")


def _verdict(records: Sequence[dict[str, Any]]) -> int:
    if any(record["kind"] == "broken" for record in records):
        return 1
    comparisons = [c for record in records for c in record.get("comparisons", {}).values()]
    invalid = sum(not comparison["valid"] for comparison in comparisons)
    if invalid:
        print(f"granikv: INVALID: {invalid} of {len(comparisons)} comparisons; the table says why", file=sys.stderr)
        return INVALID
    return 0
