"""The FlashInfer cascade engine for ``kernel_decode.py``: captured empty, planned, replayed, as in SGLang."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from kernel_harness import Batch, reference, rms_ratio, time_graph

from granikv_kernels.record import DecodeCase
from granikv_sglang.backends import DecodeBatch, Geometry
from granikv_sglang.backends.cascade import CascadeSharedDecode
from granikv_sglang.core import Reason, Regime
from granikv_sglang.plan import Decision, Item, Plan

LOG_E_2 = 0.6931471805599453


class Bench:
    """The engine, a batch, and the two plans that a graph sees: the empty one of its capture and the case's own."""

    def __init__(self, case: DecodeCase, batch: Batch, layers: int) -> None:
        geometry = Geometry(case.q_heads, case.kv_heads, case.head_dim, getattr(torch, case.dtype), batch.q[0].device)
        self.engine = CascadeSharedDecode(geometry, case.rows, batch.k[0].shape[0])
        self.batch, self.layers = batch, layers
        lens = batch.seq_lens.cpu().pin_memory()
        self.decode = DecodeBatch(batch.req_to_token, batch.req_index, batch.seq_lens, lens)
        self.items = tuple(Item(start, n, tuple(rows), i) for i, (start, n, rows) in enumerate(batch.items))
        self.version = 0

    def prepare(self, *, empty: bool = False, again: bool = False) -> None:
        """Plan the pass; ``again`` keeps the version, as a decode step does."""
        self.version += 0 if again else 1
        rows = self.batch.case.rows
        items, coverage = ((), np.zeros(rows, np.int32)) if empty else (self.items, self.batch.coverage)
        plan = Plan(Decision(Regime.CASCADE, Reason.FORCED), items, coverage, self.version)
        self.engine.prepare(plan, self.decode)

    def layer(self, i: int) -> torch.Tensor:
        if i == 0:
            self.engine.begin()
        return self.engine.run(self.batch.q[i], self.batch.k[i], self.batch.v[i], self.batch.scale)

    def time(self, call: Callable[[int], Any], repeats: int) -> tuple[float, float, float]:
        """Median, least and greatest microseconds of a call per layer, in a graph captured with the empty plan."""
        self.prepare(empty=True)
        return time_graph(
            lambda: [call(i) for i in range(self.layers)],  # type: ignore[arg-type,return-value]
            self.layers,
            repeats,
            self.prepare,
        )

    def host_us(self, again: bool) -> float:
        """Least microseconds of planning on the host; a pass in between keeps pinned buffers free."""
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.prepare(again=again)
            times.append(time.perf_counter() - began)
        return min(times) * 1e6


def bench_cascade(case: DecodeCase, batch: Batch, layers: int, repeats: int) -> dict[str, Any]:
    """One line of results: the layer and its parts, the error of a replay, host planning."""
    bench = Bench(case, batch, layers)
    row: dict[str, Any] = {"op": "cascade", "engine": "cascade", "case": case.name}
    outs: list[torch.Tensor] = []
    parts: dict[str, Callable[[int], Any]] = {"layer": lambda i: outs.append(bench.layer(i))}
    median, least, most = bench.time(parts["layer"], repeats)
    row["layer_us"], row["layer_range_us"] = median, [least, most]
    # The graph is gone, its outputs are not: the last `layers` of them were recorded, and the last replay wrote them.
    expected, _ = reference(batch)
    row["rms_error"] = rms_ratio(outs[-layers], expected)
    bench.prepare()
    bench.layer(0)
    row["lse_error"] = (bench.engine.lse[: case.rows] * LOG_E_2 - reference(batch)[1]).abs().max().item()
    one = bench.engine.current
    assert one is not None
    parts |= {
        "prefix": lambda i: one.run_prefix(batch.q[i], batch.k[i], batch.v[i], batch.scale),
        "tail": lambda i: one.run_tails(batch.q[i], batch.k[i], batch.v[i], batch.scale),
        "merge": lambda i: one.run_merge(batch.q[i]),
    }
    del parts["layer"]
    for name, call in parts.items():
        median, least, most = bench.time(call, repeats)
        row[f"{name}_us"], row[f"{name}_range_us"] = median, [least, most]
    row["plan_us"], row["step_plan_us"] = bench.host_us(again=False), bench.host_us(again=True)
    row["scratch_mib"] = bench.engine.scratch.bytes / (1 << 20)
    return row | {"repeats": repeats, "layers": layers}
