"""A cache world without a model: real allocator, real tree, real promoter, and KV whose content can be checked.

The K buffer holds, for each slot, a hash of the whole token prefix that the slot stands for, so that any stale, moved
or doubly used slot shows up as wrong content. The plain model is a dict from that hash to the prefix
it stands for, filled when a prefix is computed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from granikv_sglang.config import GraniKVConfig
from granikv_sglang.core import Counters
from granikv_sglang.plugin.promoter import Promoter
from granikv_sglang.pools.allocator import ElasticAllocator
from granikv_sglang.tree.radix import GraniRadixCache

MAX_CONTEXT = 1024


class Rows:
    """The part of SGLang's ReqToTokenPool that the tree uses."""

    def __init__(self, rows: int) -> None:
        self.req_to_token = torch.zeros((rows, MAX_CONTEXT), dtype=torch.int32)
        self.free = list(range(rows))

    def write(self, indices: tuple, values: torch.Tensor) -> None:
        self.req_to_token[indices] = values.to(torch.int32)


@dataclass(eq=False)
class FakeReq:
    """A request with the fields that SGLang's tree, our promoter and the audit read."""

    rid: str
    origin_input_ids: array
    extra_key: str | None
    max_new: int = 64
    output_ids: array = field(default_factory=lambda: array("q"))
    filled: int = 0
    req_pool_idx: int | None = None
    last_node: object = None
    cache_protected_len: int = 0
    prefix_indices: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    priority: int = 0
    kv: SimpleNamespace | None = None

    @property
    def sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace(max_new_tokens=self.max_new)

    @property
    def tokens(self) -> array:
        return self.origin_input_ids + self.output_ids

    @property
    def full_untruncated_fill_ids(self) -> array:
        return self.tokens

    @property
    def extend_range(self) -> SimpleNamespace:
        return SimpleNamespace(end=self.filled)

    def get_fill_ids(self) -> array:
        return self.full_untruncated_fill_ids[: self.extend_range.end]


def contents(tokens: array, extra_key: str | None) -> list[int]:
    """For each position, a hash that stands for the whole prefix up to and with it."""
    chain, value = [], hash(extra_key)
    for token in tokens:
        value = hash((value, token))
        chain.append(value)
    return chain


class World:
    """Drives allocator, tree and promoter the way SGLang's scheduler does; every step can be audited.

    Args:
        slots: of the pool.
        tree: class of the tree.
        events: whether the tree queues SGLang's KV events.
        max_rows: requests that may be live at a time.
        options: of the configuration.
    """

    def __init__(
        self,
        slots: int = 2048,
        tree: type[GraniRadixCache] = GraniRadixCache,
        events: bool = False,
        max_rows: int = 16,
        **options: int,
    ) -> None:
        self.pool = SimpleNamespace(
            k_buffer=[torch.zeros(slots + 1, dtype=torch.int64)], v_buffer=[torch.zeros(slots + 1, dtype=torch.int64)]
        )
        self.rows = Rows(max_rows)
        self.allocator = ElasticAllocator(slots, torch.int64, "cpu", self.pool)
        self.counters = Counters()
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
            enable_kv_cache_events=events,
        )
        self.tree = tree(params, self.counters)
        self.config = GraniKVConfig(**{"min_tokens": 32, **options})
        self.promoter = Promoter(self.tree, self.config, self.counters)
        self.live: list[FakeReq] = []
        self.known: dict[int, tuple[str | None, int]] = {}
        self._next = 0

    # -- what a scheduler does -----------------------------------------------------------------------------------------

    def admit(
        self, tokens: array, extra_key: str | None = None, max_new: int = 64, priority: int = 0
    ) -> FakeReq | None:
        """Match, lock, and take a row; nothing is computed yet. None when no row or no memory is left."""
        req = FakeReq(f"r{self._next}", tokens, extra_key, max_new, priority=priority)
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens[: len(tokens) - 1], extra_key)))
        self.check_match(tokens, extra_key, match.device_indices)
        if not self.rows.free:
            return None
        self._next += 1
        req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
        req.cache_protected_len = req.filled = len(match.device_indices)
        self.tree.inc_lock_ref(req.last_node)
        req.req_pool_idx = self.rows.free.pop()
        self.rows.write((req.req_pool_idx, slice(0, req.filled)), req.prefix_indices)
        req.kv = SimpleNamespace(kv_allocated_len=req.filled)
        self.live.append(req)
        return req

    def prefill(self, req: FakeReq, upto: int | None = None) -> bool:
        """Compute the prompt up to ``upto`` tokens (a chunk) and cache it. False when memory is short."""
        upto = len(req.tokens) if upto is None else min(upto, len(req.tokens))
        if not self._write(req, upto):
            return False
        self.tree.cache_unfinished_req(req, chunked=upto < len(req.tokens))
        return True

    def decode(self, req: FakeReq, token: int) -> bool:
        req.output_ids.append(token)
        if not self._write(req, len(req.tokens)):
            req.output_ids.pop()
            return False
        return True

    def release(self, req: FakeReq, insert: bool) -> None:
        """Finish (insert) or abort / retract (no insert)."""
        self.tree.cache_finished_req(req, is_insert=insert, kv_len_to_handle=req.filled)
        self.rows.free.append(req.req_pool_idx)
        req.req_pool_idx, req.kv = None, None
        self.live.remove(req)

    def promote(self) -> None:
        scheduler = SimpleNamespace(chunked_req=None, device="cpu", enable_overlap=False)
        self.promoter.at_safe_point(scheduler, SimpleNamespace(reqs=self.live), None)

    def evict(self, tokens: int) -> int:
        return self.tree.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted

    def flush(self) -> None:
        assert not self.live
        self.tree.reset()
        self.allocator.clear()
        self.known.clear()

    def _write(self, req: FakeReq, upto: int) -> bool:
        need = upto - req.filled
        if self.allocator.available_size() < need:
            self.evict(need - self.allocator.available_size())
        slots = self.allocator.alloc(need)
        if slots is None:
            return False
        values = contents(req.tokens, req.extra_key)[req.filled : upto]
        self.pool.k_buffer[0][slots] = torch.tensor(values, dtype=torch.int64)
        self.pool.v_buffer[0][slots] = -torch.tensor(values, dtype=torch.int64)
        self.known.update({value: (req.extra_key, req.filled + i + 1) for i, value in enumerate(values)})
        self.rows.write((req.req_pool_idx, slice(req.filled, upto)), slots)
        req.filled = upto
        req.kv.kv_allocated_len = upto
        return True

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check_match(self, tokens: array, extra_key: str | None, slots: torch.Tensor) -> None:
        """A match names slots that hold exactly the content the plain model knows for that prefix."""
        expected = contents(tokens, extra_key)[: len(slots)]
        assert self.pool.k_buffer[0][slots].tolist() == expected, "a slot holds another prefix's KV"
        assert self.pool.v_buffer[0][slots].tolist() == [-value for value in expected]
        for position, value in enumerate(expected):
            assert self.known.get(value) == (extra_key, position + 1), "a prefix nobody computed was matched"

    def check(self) -> None:
        """Conservation, and for every live request content, plan and row agree."""
        self.promoter.audit(self.live)
        for req in self.live:
            row = self.rows.req_to_token[req.req_pool_idx, : req.filled].to(torch.int64)
            self.check_match(req.tokens, req.extra_key, row)
            covered = [slot for _, span in self.tree.hot_path(req.last_node) for slot in range(span.start, span.stop)]
            assert row[: len(covered)].tolist() == covered, "a HOT path is not the leading span of its request"
            assert len(covered) <= req.cache_protected_len
            assert torch.equal(req.prefix_indices, row[: len(req.prefix_indices)]), "stale prefix_indices"
