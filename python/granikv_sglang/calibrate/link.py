"""The all-reduce between tensor-parallel ranks: timed as SGLang sets it up, a process a rank; two constants fit it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from granikv_sglang.core import GraniKVError, cache_root
from granikv_sglang.plan import Kind
from granikv_sglang.plan.cost import Link
from granikv_sglang.plan.table import COMMAND, Device, find, load, save, user_path

ROWS, HIDDEN = (1, 2, 4, 8, 16, 32, 64, 128, 256), 5120
"""Batch sizes and the width of a hidden state in two bytes: 10 KB to 2.6 MB, what decode steps of 14B to 32B send."""
CALLS, REPEATS = 20, 15
SECONDS = 240.0

Timed = tuple[int, float]
"""Bytes of the tensor, microseconds of one all-reduce."""


def calibrate_link(tp: int, device: Device, out: Path | None) -> list[str]:
    """Time the all-reduce between ``tp`` ranks and put it into the calibration in force, or into the one at ``out``.

    Returns lines for people. Raises GraniKVError where there is no calibration to put it into, or a rank fails.
    """
    if tp < 2:
        raise GraniKVError(f"--tp must be at least 2, got {tp}: one rank has nobody to exchange with")
    path = out or user_path(cache_root(), device.name)
    if out is not None:
        constants, about = load(out, device)
    else:
        found = find(device, cache_root())
        if found.source == "analytic":
            raise GraniKVError(f"{device.name} has no calibration for the all-reduce to go into; run {COMMAND} first")
        constants, about = found.constants, found.provenance
    timed = ask_ranks(tp, device.machine.kind)
    link = fit_link(timed)
    worst = max(abs(link.us_of(size) / us - 1) for size, us in timed)
    points = [[size, round(us, 2)] for size, us in timed]
    date = time.strftime("%Y-%m-%d", time.gmtime())
    about = {**about, "link": {"tp": tp, "date": date, "bytes_us": points, "worst_error": round(worst, 4)}}
    save(path, device, dataclasses.replace(constants, link=link), about)
    return [
        f"all-reduce between {tp} ranks: {link.us:.1f} us and {link.rate / 1e3:.1f} GB/s, at most {worst:.0%} off",
        f"written to {path}; servers started from now on use it",
    ]


def fit_link(timed: Sequence[Timed]) -> Link:
    """Least squares of the relative errors; both constants stay positive whatever the noise."""
    # us = a + b * bytes, each equation divided by its us.
    aa = sum(1 / us**2 for _, us in timed)
    ab = sum(size / us**2 for size, us in timed)
    bb = sum((size / us) ** 2 for size, us in timed)
    a1, b1 = sum(1 / us for _, us in timed), sum(size / us for size, us in timed)
    determinant = aa * bb - ab * ab
    a, b = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if b <= 0:  # size does not matter in this range
        a, b = a1 / aa, 1e-9
    if a <= 0:
        a, b = 1e-3, b1 / bb
    return Link(a, 1 / b)


def ask_ranks(tp: int, kind: Kind) -> list[Timed]:
    """Run one process a rank; what rank 0 has timed. Raises GraniKVError with the last line of a rank that failed."""
    from granikv_sglang.plugin.platform import prepare_tensor_parallel  # noqa: PLC0415
    from granikv_sglang.server.process import free_ports  # noqa: PLC0415

    env = dict(os.environ)
    if kind is Kind.CPU:
        prepare_tensor_parallel(env, tp, sorted(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "granikv_sglang.calibrate", "--tp", str(tp), "--device", _DEVICE[kind]]
    command += ["--port", str(free_ports(1)[0]), "--rank"]
    # Files and not pipes: a rank that writes much would wait for a reader while the others wait for it.
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        places = [(Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err") for rank in range(tp)]
        opened = [[files.enter_context(path.open("w")) for path in own] for own in places]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=out, stderr=err, env=env)
            for rank, (out, err) in enumerate(opened)
        ]
        try:
            _wait_for(ranks, [err for _, err in places])
        finally:
            for rank in ranks:
                rank.kill()
        rows = [json.loads(line) for line in places[0][0].read_text().splitlines() if line.startswith("[")]
    return [(int(size), float(us)) for size, us in rows[-1]]


def _wait_for(ranks: Sequence[subprocess.Popen[Any]], errors: Sequence[Path]) -> None:
    """Until all have ended well. The first that fails is named: the others only wait for it."""
    ends = time.monotonic() + SECONDS
    while True:
        codes = [rank.poll() for rank in ranks]
        for number, code in enumerate(codes):
            if code:
                last = (errors[number].read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
                raise GraniKVError(f"rank {number} of {len(ranks)} ended with exit code {code}, its last line: {last}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > ends:
            raise GraniKVError(f"the {len(ranks)} ranks were not done after {SECONDS:.0f} s")
        time.sleep(0.05)


_DEVICE = {Kind.CUDA: "auto", Kind.CPU: "cpu"}


def run_rank(rank: int, tp: int, port: int, cuda: bool) -> None:
    """One rank: join the others as SGLang's workers do, time every size; rank 0 prints the list."""
    import torch  # noqa: PLC0415
    from sglang.srt.distributed import parallel_state as upstream  # noqa: PLC0415

    if cuda:
        torch.cuda.set_device(rank)
    init, backend = f"tcp://127.0.0.1:{port}", "nccl" if cuda else "gloo"
    upstream.init_distributed_environment(tp, rank, init, rank, backend)
    upstream.initialize_model_parallel(tp)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    timed = []
    for rows in ROWS:
        data = torch.zeros((rows, HIDDEN), dtype=torch.bfloat16, device=device)
        timed.append((data.numel() * data.element_size(), (_graph_us if cuda else _host_us)(data)))
    if rank == 0:
        print(json.dumps(timed), flush=True)
    torch.distributed.barrier()
    upstream.destroy_model_parallel()
    upstream.destroy_distributed_environment()


def _host_us(data: Any) -> float:
    from sglang.srt.distributed import tensor_model_parallel_all_reduce  # noqa: PLC0415

    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            tensor_model_parallel_all_reduce(data)
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return min(times)


def _graph_us(data: Any) -> float:
    """Median of replays of a graph of :data:`CALLS` all-reduces, as decode steps have them."""
    import torch  # noqa: PLC0415
    from sglang.srt.distributed import tensor_model_parallel_all_reduce  # noqa: PLC0415
    from sglang.srt.distributed.parallel_state import graph_capture  # noqa: PLC0415

    tensor_model_parallel_all_reduce(data)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture() as context, torch.cuda.graph(graph, stream=context.stream):
        for _ in range(CALLS):
            kept = tensor_model_parallel_all_reduce(data)
    times = []
    for _ in range(REPEATS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.distributed.barrier()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    del kept
    return statistics.median(times[2:])
