"""Inputs, correctness check and CUDA-graph timing shared by the kernel benchmarks."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from granikv_kernels.grouped_decode import GroupedDecode, KernelConfig, grouped_decode_reference, small_config
from granikv_kernels.record import DecodeCase
from granikv_sglang.core import commit


@dataclass
class Batch:
    """Random inputs of a case, several layers of them: together beyond L2, as in a model."""

    case: DecodeCase
    items: list[tuple[int, int, list[int]]]
    coverage: np.ndarray
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    q: list[torch.Tensor]
    out: list[torch.Tensor]
    req_to_token: torch.Tensor
    req_index: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.case.head_dim) ** -0.5


def make_batch(case: DecodeCase, layers: int, device: str = "cuda", seed: int = 0) -> Batch:
    """Prefixes in extents with unaligned gaps, tails in slots drawn at random; every slot not in use is NaN."""
    gen = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    items, at = [], 7
    for tokens, rows in case.items:
        items.append((at, tokens, list(rows)))
        at += tokens + 13
    coverage = np.array(case.coverage, np.int32)
    tail_total = sum(case.tails)
    slots = at + tail_total + 64
    free = at + torch.randperm(tail_total + 64, generator=gen, device=device)
    lens = torch.tensor(case.coverage, device=device) + torch.tensor(case.tails, device=device)
    req_to_token = torch.zeros((case.rows + 2, int(lens.max()) + 3), dtype=torch.int32, device=device)
    req_index = torch.randperm(case.rows + 2, generator=gen, device=device)[: case.rows]
    used = torch.zeros(slots, dtype=torch.bool, device=device)
    for start, tokens, _ in items:
        used[start : start + tokens] = True
    taken = 0
    for row, (begin, tail) in enumerate(zip(case.coverage, case.tails, strict=True)):
        chosen = free[taken : taken + tail]
        taken += tail
        req_to_token[req_index[row], begin : begin + tail] = chosen.int()
        used[chosen] = True

    def cache() -> torch.Tensor:
        data = torch.randn((slots, case.kv_heads, case.head_dim), generator=gen, device=device).to(dtype)
        data[~used] = float("nan")
        return data

    def rows() -> torch.Tensor:
        return torch.randn((case.rows, case.q_heads, case.head_dim), generator=gen, device=device).to(dtype)

    k, v, q = ([make() for _ in range(layers)] for make in (cache, cache, rows))
    out = [torch.full_like(x, float("nan")) for x in q]
    return Batch(case, items, coverage, k, v, q, out, req_to_token, req_index, lens)


def shipped_config(case: DecodeCase) -> KernelConfig | None:
    """What the engine takes: the small variant where no item has more query rows than its tile."""
    small = small_config(getattr(torch, case.dtype), case.head_dim)
    most = max((len(rows) for _, rows in case.items), default=0) * case.q_heads // case.kv_heads
    return small if small is not None and most <= small.wide.block_m else None


def make_op(batch: Batch, config: KernelConfig | None = None, num_sms: int | None = None) -> GroupedDecode:
    """The op for a batch, planned, every buffer that a kernel writes poisoned with NaN. Default: as shipped."""
    case = batch.case
    config = config or shipped_config(case)
    pairs = max(1, sum(len(rows) for _, rows in case.items))
    op = GroupedDecode(
        case.rows, max(1, len(case.items)), pairs, case.q_heads, case.kv_heads, case.head_dim,
        getattr(torch, case.dtype), batch.q[0].device, num_sms, config,
    )  # fmt: skip
    op.poison()
    op.plan(batch.items, batch.coverage)
    return op


def run_layer(op: GroupedDecode, batch: Batch, layer: int, reschedule: bool = True) -> torch.Tensor:
    return op.run(
        batch.q[layer], batch.k[layer], batch.v[layer], batch.req_to_token, batch.req_index, batch.seq_lens,
        batch.scale, batch.out[layer], reschedule,
    )  # fmt: skip


def reference(batch: Batch, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in float32 of the reference."""
    k, v = (x[layer].nan_to_num(0.0) for x in (batch.k, batch.v))
    return grouped_decode_reference(
        batch.items, batch.coverage, batch.q[layer].float(), k.float(), v.float(), batch.req_to_token, batch.req_index,
        batch.seq_lens, batch.scale,
    )  # fmt: skip


def rms_ratio(value: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the error over RMS of the reference; NaN where anything is NaN."""
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def time_graph(
    record: Callable[[], None], calls: int, repeats: int = 30, before_replay: Callable[[], None] | None = None
) -> tuple[float, float, float]:
    """Median, least and greatest microseconds per call of a recorded function that makes ``calls`` calls.

    ``before_replay`` runs once between the capture and the first replay.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        record()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    if before_replay is not None:
        before_replay()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times), min(times), max(times)


def environment() -> dict[str, Any]:
    """What a result has to be read with."""
    return {
        "commit": commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
