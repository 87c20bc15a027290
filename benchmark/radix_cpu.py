"""Host cost of the radix tree at long prefixes: GraniKV's tree against SGLang's, on the CPU, no model, alternated.

Usage: PYTHONPATH=python:kernels:test:benchmark python benchmark/radix_cpu.py [OUT.jsonl] [--device cuda]

A request finds a prefix of P tokens in the tree, prefills 128 tokens of its own and decodes 128. Timed per request:
``match`` once more with all of its tokens, as each scheduling pass does for each request that waits; ``unfinished``
after its prefill; ``finished`` with an insertion. 32 requests a repetition; the two sides in turn, A B, B A. With
``--device cuda`` slots live on the GPU, as in an engine there: host time still, launches included, the GPU idle before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernel_harness import environment, write_lines
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from granikv_sglang.core import Counters
from granikv_sglang.pools.allocator import ElasticAllocator
from granikv_sglang.tree.radix import GraniRadixCache
from support.world import FakeReq

PREFIXES = (1024, 4096, 16384)
OWN, ANSWER, REQUESTS, REPEATS = 128, 128, 32, 15
STEPS = ("match", "unfinished", "finished")


class Rows:
    """``req_to_token`` for all requests of a repetition."""

    def __init__(self, rows: int, context: int, device: str) -> None:
        self.req_to_token = torch.zeros((rows, context), dtype=torch.int32, device=device)

    def write(self, indices: tuple[Any, ...], values: torch.Tensor) -> None:
        self.req_to_token[indices] = values


class Request(FakeReq):
    """Holds its tokens joined, as SGLang's ``Req`` does; the support world's joins them at every look."""

    joined: array

    @property
    def full_untruncated_fill_ids(self) -> array:
        return self.joined


class Side:
    """One tree with a pool of its own and a warm prefix."""

    def __init__(self, build: Callable[[CacheInitParams], RadixCache], prefix: int, device: str) -> None:
        slots = 2 * prefix + (REQUESTS + 1) * (OWN + ANSWER + 2)
        self.rows = Rows(REQUESTS + 1, prefix + OWN + ANSWER + 1, device)
        self.allocator = ElasticAllocator(slots, torch.int64, device, None)
        self.tree = build(CacheInitParams(False, self.rows, self.allocator, page_size=1))
        self.prefix = array("q", range(1, prefix + 1))
        warm = self._request(0, array("q", [7]))
        self._admit(warm)
        self._prefill(warm)
        self.tree.cache_finished_req(warm, kv_len_to_handle=warm.filled)

    def repetition(self, tag: int) -> dict[str, float]:
        """Milliseconds per request of each step; the tree is back where it was, but for nodes that nobody holds."""
        tree = self.tree
        requests = [self._request(row, array("q", [1000 * (tag + 2) + row] * OWN)) for row in range(REQUESTS)]
        for req in requests:
            self._admit(req)
        took = {}
        tokens = [req.origin_input_ids + req.output_ids for req in requests]
        took["match"] = timed(lambda i: tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens[i]))))
        for req in requests:
            self._prefill(req)
        took["unfinished"] = timed(lambda i: tree.cache_unfinished_req(requests[i]))
        for req in requests:
            req.output_ids.extend([5] * ANSWER)
            self._prefill(req)
        self.allocator.free_group_begin()
        took["finished"] = timed(lambda i: tree.cache_finished_req(requests[i], kv_len_to_handle=requests[i].filled))
        self.allocator.free_group_end()
        self._forget(requests)
        return took

    def _request(self, row: int, own: array) -> Request:
        req = Request(f"r{row}", self.prefix + own, None)
        req.req_pool_idx, req.joined = row, self.prefix + own
        return req

    def _admit(self, req: Request) -> None:
        limit = len(req.joined) - 1
        found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(req.joined, limit=limit)))
        req.prefix_indices, req.last_node = found.device_indices, found.last_device_node
        req.cache_protected_len = req.filled = len(found.device_indices)
        self.tree.inc_lock_ref(req.last_node)
        self.rows.write((req.req_pool_idx, slice(0, req.filled)), req.prefix_indices)

    def _prefill(self, req: Request) -> None:
        upto = len(req.origin_input_ids) + len(req.output_ids)
        slots = self.allocator.alloc(upto - req.filled)
        assert slots is not None
        self.rows.write((req.req_pool_idx, slice(req.filled, upto)), slots)
        req.filled = upto

    def _forget(self, requests: list[Request]) -> None:
        """Evict what the requests left, so that each repetition sees the same tree."""
        for leaf in list(self.tree.evictable_leaves):
            while leaf is not self.tree.root_node and not leaf.children and leaf.lock_ref == 0:
                if leaf.key.token_ids[0] == self.prefix[0]:
                    break
                above = leaf.parent
                self.allocator.free(leaf.value)
                self.tree._delete_leaf(leaf)
                leaf = above


def timed(call: Callable[[int], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    for i in range(REQUESTS):
        call(i)
    return (time.perf_counter() - began) * 1e3 / REQUESTS


def bench(prefix: int, device: str) -> dict[str, Any]:
    sides = {
        "granikv": Side(lambda p: GraniRadixCache(p, Counters()), prefix, device),
        "stock": Side(RadixCache, prefix, device),
    }
    times: dict[str, dict[str, list[float]]] = {name: {step: [] for step in STEPS} for name in sides}
    for repetition in range(REPEATS + 2):
        order = list(sides) if repetition % 2 == 0 else list(reversed(sides))
        for name in order:
            took = sides[name].repetition(repetition)
            for step in STEPS:
                if repetition >= 2:  # the first ones warm up
                    times[name][step].append(took[step])
    row: dict[str, Any] = {
        "bench": "radix_cpu",
        "device": device,
        "prefix": prefix,
        "repeats": REPEATS,
        "requests": REQUESTS,
    }
    for step in STEPS:
        ours, stock = (times[name][step] for name in ("granikv", "stock"))
        ratios = [b / a for a, b in zip(ours, stock, strict=True)]
        row[step] = {
            "granikv_ms": statistics.median(ours),
            "stock_ms": statistics.median(stock),
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [bench(prefix, args.device) for prefix in PREFIXES]
    if args.out is not None:
        write_lines(args.out, [environment() | row for row in rows])
    print(f"{'prefix':>7s} {'step':>11s} {'granikv ms':>11s} {'stock ms':>9s} {'ratio':>6s} {'range':>14s}")
    for row in rows:
        for step in STEPS:
            cell = row[step]
            low, high = cell["ratio_range"]
            print(
                f"{row['prefix']:7d} {step:>11s} {cell['granikv_ms']:11.4f} {cell['stock_ms']:9.4f} "
                f"{cell['ratio']:6.2f} {f'{low:.2f} - {high:.2f}':>14s}"
            )


if __name__ == "__main__":
    main()
