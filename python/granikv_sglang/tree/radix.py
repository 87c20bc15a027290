"""GraniRadixCache: SGLang's radix tree, with long shared root paths swung onto contiguous HOT spans.

Thin adapter: matching, locking, insertion and eviction stay upstream's (:mod:`granikv_sglang.tree.lean` shortens their
walks). What is added is a table from node to span, kept right through split, eviction and flush, and the promotion that
swings a path onto an extent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.mem_cache.utils import get_eviction_strategy

from granikv_sglang.core import Counters, Decline, Span
from granikv_sglang.pools.allocator import ElasticAllocator
from granikv_sglang.tree.lean import LeanRadixCache
from granikv_sglang.tree.policy import NodeView, Segment
from granikv_sglang.tree.room import BLOCKED, FREE, least_recent_window

EXTENT_ALIGN = 256
"""Every extent starts at a multiple of this many slots, so that a 256-token page view and a tensor map both fit."""

EVICT_AHEAD, EVICT_AHEAD_SHARE = 2048, 128
"""Tokens evicted at a time at least: so many, or the pool over the second where that is less."""

CopySlots = Callable[[torch.Tensor, torch.Tensor], None]
"""``copy(source_slots, destination_slots)`` moves K and V of all layers on the stream that runs forwards."""


class _WithoutTies:
    """An eviction strategy of upstream's whose ties go to the older node: ranks must evict alike."""

    def __init__(self, upstream: Any) -> None:
        self._upstream = upstream

    def get_priority(self, node: TreeNode) -> tuple[Any, int]:
        return self._upstream.get_priority(node), node.id


class GraniRadixCache(LeanRadixCache):
    """Radix cache whose nodes are HOT (one contiguous span each) or COLD (any slots).

    A HOT node's parent is HOT or the root, so HOT covers a leading span of every request. ``epoch`` changes whenever
    the path of an existing node may have changed (split, promotion, eviction, flush); it keys cached plans.

    Upstream contract: ``sglang.srt.mem_cache.radix_cache.RadixCache`` at 0.5.17, the methods overridden below.
    """

    def __init__(self, params: CacheInitParams, counters: Counters) -> None:
        self.hot: dict[int, Span] = {}
        self.epoch = 0
        self._hot_paths: dict[int, tuple[tuple[int, Span], ...]] = {}
        self._hot_paths_epoch = -1
        self.counters = counters
        self.allocator: ElasticAllocator = params.token_to_kv_pool_allocator
        self.on_answer: Callable[[Sequence[int]], None] | None = None
        """Told the output tokens of every request that ends, in the order in which they end."""
        super().__init__(params)
        # Upstream breaks ties by the order of a set of objects, which is another one in every process.
        self.eviction_strategy: Any = _WithoutTies(get_eviction_strategy(self.eviction_policy))

    # -- what upstream calls -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self.hot.clear()
        self.epoch += 1

    def evict(self, params: EvictParams) -> EvictResult:
        """Upstream's, a little ahead.

        In a full pool upstream evicts at every decode step just what the step lacks, and each time puts all leaves into
        a heap: 2 ms of the scheduler's time at 128 requests, of a step that takes the GPU 9.
        """
        ahead = min(EVICT_AHEAD, self.allocator.size // EVICT_AHEAD_SHARE)
        if 0 < params.num_tokens < ahead:
            params = dataclasses.replace(params, num_tokens=ahead)
        return super().evict(params)

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        if self.on_answer is not None:
            self.on_answer(req.output_ids)
        super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(key, child, split_len)
        span = self.hot.get(child.id)
        if span is not None:
            # No copy: two nodes over two sub-runs. Only the first keeps an aligned start.
            self.hot[upper.id], self.hot[child.id] = span.split(split_len)
            self.counters.hot_splits += 1
        self.epoch += 1
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        span = self.hot.pop(node.id, None)
        if span is not None:
            self.counters.hot_evictions += 1
            self.counters.hot_evicted_tokens += span.length
            self.epoch += 1

    # -- what the planner and the policy read --------------------------------------------------------------------------

    def hot_path(self, node: TreeNode | None) -> tuple[tuple[int, Span], ...]:
        """``(node id, span)`` of the HOT nodes on the way from the root to ``node``, top first: a leading span.

        One object for all who share the path, as long as ``epoch`` stands.
        """
        if node is None:
            return ()
        # What is above a HOT node is HOT, so the first one met decides. A plain loop: it runs for every request.
        while node.id not in self.hot:
            if node is self.root_node:
                return ()
            node = node.parent
        if self._hot_paths_epoch != self.epoch:
            self._hot_paths_epoch = self.epoch
            self._hot_paths.clear()
        path = self._hot_paths.get(node.id)
        if path is None:
            nodes = reversed(list(self.upwards(node)))
            path = self._hot_paths[node.id] = tuple((above.id, self.hot[above.id]) for above in nodes)
        return path

    def prefix_path(self, node: TreeNode | None) -> tuple[tuple[int, Span], ...]:
        """As :meth:`hot_path`, but every node, HOT or not, and spans in token positions, not in slots."""
        path, at = [], 0
        for above in reversed(list(self.upwards(node))) if node is not None else ():
            path.append((above.id, Span(at, len(above.key))))
            at += len(above.key)
        return tuple(path)

    def views(self, holders: Iterable[tuple[TreeNode, int]]) -> list[NodeView]:
        """Policy views of every node that live requests hold, parents before children.

        ``holders`` gives each live request's last node and the decode steps it may still take.
        """
        held: dict[int, list[int]] = {}
        order: list[TreeNode] = []
        for last_node, remaining in holders:
            for node in reversed(list(self.upwards(last_node))):
                if node.id not in held:
                    held[node.id] = []
                    order.append(node)
                held[node.id].append(remaining)
        views: dict[int, NodeView] = {}
        for node in order:
            above = views.get(node.parent.id)
            views[node.id] = NodeView(
                node_id=node.id,
                parent_id=above.node_id if above else None,
                tokens=len(node.key),
                path_tokens=len(node.key) + (above.path_tokens if above else 0),
                hot=node.id in self.hot,
                remaining=tuple(held[node.id]),
            )
        return list(views.values())

    # -- promotion -----------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> int | None:
        """First slot of a free run for an extent, taken out of the free ones; None where even eviction makes no room.

        Where the host does not know of such a run it reads the free slots, and so waits for the stream in force.
        """
        start = self.allocator.alloc_run(tokens, EXTENT_ALIGN)
        if start is None and self._make_room(tokens):
            start = self.allocator.alloc_run(tokens, EXTENT_ALIGN)
        return start

    def room(self) -> int:
        """The most tokens that an extent can have, right after :meth:`reserve` has found no room for more."""
        return self.allocator.longest_known_run(EXTENT_ALIGN)

    def leading_part(self, segment: Segment, last_node: TreeNode, tokens: int) -> Segment:
        """The first ``tokens`` of a COLD segment as a segment of their own; the node in which they end is split.

        Args:
            segment, last_node: as for :meth:`promote`.
            tokens: 0 < tokens < those of the segment.
        """
        ids, left = [], tokens
        for node in self._segment_nodes(segment, last_node):
            if left < len(node.key):
                node = self._split_node(node.key, node, left)
            ids.append(node.id)
            left -= len(node.key)
            if left == 0:
                break
        return dataclasses.replace(segment, node_ids=tuple(ids), tokens=tokens)

    def promote(
        self, segment: Segment, last_node: TreeNode, copy: CopySlots, start: int
    ) -> tuple[int, torch.Tensor, torch.Tensor] | Decline:
        """Copy a COLD segment into one extent and swing its nodes there. Does not wait for the device.

        Args:
            segment: nodes to promote, from the policy; the segment's parent is HOT or the root.
            last_node: any node at or below the segment's last one, to find the nodes by.
            copy: moves the KV of all layers.
            start: first slot of the run, from :meth:`reserve`.

        Returns:
            ``(offset, old, new)``: the tokens before the segment on its root path, and the int64 slot ids before and
            after. The caller swings everything else that caches the old ids, then frees ``old``. Or the reason it was
            declined; nothing has changed then.
        """
        nodes = self._segment_nodes(segment, last_node)
        new = torch.arange(start, start + segment.tokens, dtype=torch.int64, device=self.device)
        old = torch.cat([node.value for node in nodes])
        try:
            copy(old, new)
        except Exception:
            # Out of memory for a staging buffer, a kernel that does not launch: HOT is an optimisation, so whatever it
            # was, the run goes back and the prefix is served from COLD. Who made ``copy`` has logged it.
            self.allocator.free(new)
            return Decline.COPY_FAILED
        offset = sum(len(above.key) for above in self.upwards(nodes[0].parent))
        at = start
        for node in nodes:
            length = len(node.key)
            node.value = new[at - start : at - start + length]
            self.hot[node.id] = Span(at, length)
            at += length
        self.forget_paths()
        self.epoch += 1
        self.counters.promotions += 1
        self.counters.extended_promotions += offset > 0
        self.counters.promoted_tokens += segment.tokens
        return offset, old, new

    def _segment_nodes(self, segment: Segment, node: TreeNode) -> list[TreeNode]:
        wanted = set(segment.node_ids)
        found = [above for above in self.upwards(node) if above.id in wanted]
        found.reverse()
        if tuple(n.id for n in found) != segment.node_ids:
            raise ValueError(f"segment {segment.node_ids} is not on the path of the node given")
        return found

    # -- room ----------------------------------------------------------------------------------------------------------

    def _make_room(self, length: int) -> bool:
        """Evict the least recently used unlocked nodes in one window of ``length`` slots; False if there is none."""
        rank_of = self._recency_ranks()
        evictable = sum(len(node.key) for node in rank_of)
        if self.allocator.available_size() + evictable < length:
            return False
        rank = np.full(self.allocator.size + 1, BLOCKED, dtype=np.int64)
        rank[self.allocator.free_slots().cpu().numpy()] = FREE
        slots = {node: node.value.cpu().numpy() for node in rank_of}
        for node, position in rank_of.items():
            rank[slots[node]] = position
        start = least_recent_window(rank, length, EXTENT_ALIGN)
        if start is None:
            return False
        in_way = {n for n, s in slots.items() if bool(((s >= start) & (s < start + length)).any())}
        for node in rank_of:  # children come before parents
            if any(above in in_way for above in self.upwards(node)):
                self.allocator.free(node.value)
                self._delete_leaf(node)
                self._record_remove_event(node)
                self.counters.room_evictions += 1
        return True

    def _recency_ranks(self) -> dict[TreeNode, int]:
        """Unlocked nodes, children first, to a rank from 1 (oldest); a parent is as recent as its newest child."""
        order: list[TreeNode] = []
        stack = [self.root_node]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node is not self.root_node and node.lock_ref == 0:
                order.append(node)
        order.reverse()
        by_age = sorted(order, key=lambda n: (n.last_access_time, n.id))
        rank = {node: i + 1 for i, node in enumerate(by_age)}
        for node in order:
            if node.parent in rank:
                rank[node.parent] = max(rank[node.parent], rank[node])
        return {node: rank[node] for node in order}

    # -- state ---------------------------------------------------------------------------------------------------------

    def extents(self) -> Sequence[tuple[int, Span]]:
        """``(node id, span)`` of every HOT node, by first slot."""
        return sorted(self.hot.items(), key=lambda item: item[1].start)

    def hot_tokens(self) -> int:
        """Tokens held in HOT spans."""
        return sum(span.length for span in self.hot.values())
