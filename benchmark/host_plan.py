"""Host time of planning one decode pass, as it happens in a forward: cached, and with one member changed.

Usage: PYTHONPATH=python:kernels:test:benchmark python benchmark/host_plan.py [OUT.jsonl] [--device cuda]

``plan`` is ``Runtime._plan_for``: the key over all requests, and where it is new the HOT paths, the forest, the
classifier. ``prepare`` is ``TritonSharedDecode.prepare``: where the plan is new, units and merge lists for 132 SMs, and
their upload: on a GPU one asynchronous copy from pinned memory, on a CPU one plain copy. ``total`` is both. No kernel
runs, and SGLang's own preparation of a pass is not in it. Every group has a HOT prefix of 1K tokens in a real tree;
the regime is forced, so that this engine plans at every point. Target: 256 requests in 64 groups within 150 us cached,
1 ms with new membership.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from kernel_harness import environment, write_lines
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from granikv_kernels.grouped_decode import GroupedDecode
from granikv_sglang.backends import DecodeBatch, Geometry
from granikv_sglang.backends.triton import LEVELS, TritonSharedDecode
from granikv_sglang.config import GraniKVConfig
from granikv_sglang.core import Regime, Span
from granikv_sglang.plan import Classifier, Kind, Machine, Planner, Shape
from granikv_sglang.plugin.runtime import Runtime
from granikv_sglang.tree.radix import GraniRadixCache
from support.world import World

POINTS = ((16, 1), (64, 1), (128, 8), (256, 1), (256, 64))
PREFIX, SMS, LAYERS = 1024, 132, 32
WARM, CACHED, CHANGED = 20, 1000, 400
TARGET_US = {"cached": 150, "changed": 1000}


class Pass:
    """A runtime with a tree and an engine, and a batch whose members come and go."""

    def __init__(self, requests: int, groups: int, device: str) -> None:
        geometry = Geometry(32, 8, 128, torch.bfloat16, torch.device(device))
        self.engine = TritonSharedDecode(geometry, requests)
        # Planned for an H200's SMs wherever this runs.
        self.engine._op = GroupedDecode(
            requests, requests, LEVELS * requests, 32, 8, 128, torch.bfloat16, device, num_sms=SMS
        )
        self.runtime = Runtime(GraniKVConfig())
        self.tree = self.runtime.tree = _tree(groups, requests)
        self.runtime._planner = Planner(
            Classifier.of(Machine(Kind.CUDA, SMS), Regime.BATCHED_GEMM),
            shape=Shape(geometry.q_heads, geometry.kv_heads, geometry.head_dim, 2, LAYERS),
            counters=self.runtime.counters,
            capacities={Regime.BATCHED_GEMM: self.engine.capacity},
        )
        self._rids = count()
        self._heads = [self._prefix(group) for group in range(groups)]
        reqs = [self._request(i % groups) for i in range(requests)]
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE, reqs=reqs, seq_lens_cpu=torch.full((requests,), PREFIX + 2)
        )
        rows = torch.zeros(requests, dtype=torch.int64, device=device)
        self.rows = DecodeBatch(torch.zeros((1, 1), dtype=torch.int32, device=device), rows, rows, None)

    def _prefix(self, group: int) -> TreeNode:
        tokens = array("q", range(10_000 * group, 10_000 * group + PREFIX))
        start = 1 + group * PREFIX
        slots = torch.arange(start, start + PREFIX)
        node = self.tree.insert(InsertParams(key=RadixKey(tokens), value=slots)).last_device_node
        self.tree.hot[node.id] = Span(start, PREFIX)
        return node

    def _request(self, group: int) -> SimpleNamespace:
        number = next(self._rids)
        leaf = TreeNode()
        leaf.parent, leaf.key, leaf.value = self._heads[group], RadixKey(array("q", [number])), torch.zeros(1)
        return SimpleNamespace(rid=f"{number:032x}", last_node=leaf, group=group)

    def change(self) -> None:
        """One request ends, another of its group joins at the end of the batch."""
        gone = self.batch.reqs.pop(0)
        self.batch.reqs = [*self.batch.reqs, self._request(gone.group)]

    def step(self) -> tuple[float, float]:
        """Microseconds of ``plan`` and ``prepare``."""
        began = time.perf_counter()
        plan = self.runtime._plan_for(self.batch)
        planned = time.perf_counter()
        self.engine.prepare(plan, self.rows)
        ended = time.perf_counter()
        assert plan.shared
        return (planned - began) * 1e6, (ended - planned) * 1e6


def _tree(groups: int, requests: int) -> GraniRadixCache:
    world = World(slots=groups * PREFIX + requests)
    params = CacheInitParams(False, world.rows, world.allocator, page_size=1)
    return GraniRadixCache(params, world.counters)


def bench(requests: int, groups: int, device: str) -> dict[str, Any]:
    case = Pass(requests, groups, device)
    row: dict[str, Any] = {"bench": "host_plan", "device": device, "requests": requests, "groups": groups}
    for name, repeats in (("cached", CACHED), ("changed", CHANGED)):
        times = []
        for repetition in range(WARM + repeats):
            if name == "changed":
                case.change()
            taken = case.step()
            if repetition >= WARM:
                times.append((*taken, sum(taken)))
        columns = zip(("plan", "prepare", "total"), zip(*times, strict=True), strict=True)
        row[name] = {"repeats": repeats} | {part: _summary(list(column)) for part, column in columns}
    return row


def _summary(times: list[float]) -> dict[str, float]:
    return {
        "median_us": statistics.median(times),
        "p99_us": statistics.quantiles(times, n=100)[98],
        "max_us": max(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [bench(requests, groups, args.device) for requests, groups in POINTS]
    if args.out is not None:
        write_lines(args.out, [environment() | row for row in rows])
    print(f"{'requests':>8s} groups membership {'plan':>8s} {'prepare':>8s} {'total':>8s} {'p99':>8s}  us")
    for row in rows:
        for name in TARGET_US:
            cell = row[name]
            parts = " ".join(f"{cell[part]['median_us']:8.1f}" for part in ("plan", "prepare", "total"))
            print(f"{row['requests']:8d} {row['groups']:6d} {name:>10s} {parts} {cell['total']['p99_us']:8.1f}")
    print("target, 256 requests in 64 groups: " + ", ".join(f"{name} {us} us" for name, us in TARGET_US.items()))


if __name__ == "__main__":
    main()
