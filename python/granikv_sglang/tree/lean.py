"""SGLang's radix tree without the walks over tokens that are known to match, and without copies of unchanged slots.

A live request holds a lock on its ``last_node``: that node is in the tree, and the path to it spells the first
``cache_protected_len`` tokens of the request. Caching it again therefore starts at that node and sees only the tokens
behind it. Matching compares whole nodes in one ``memcmp`` and shares one tensor of slot ids among all who match a node.

What the tree looks like afterwards, split points, locks, hit counts, priorities, times, events and who owns which slot,
is upstream's to the letter: ``test/property`` runs both side by side.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

KEPT_SLOTS = 1 << 20
"""Slot ids kept in concatenated paths, in all: 8 MB of device memory."""


class RowSlots:
    """A stretch of a request's row of ``req_to_token``, as the ``value`` of an insertion.

    Upstream slices a value and clones what it keeps. Here slicing is free, and the clone is the one conversion from the
    row's int32 to the tree's int64.
    """

    def __init__(self, row: torch.Tensor, start: int = 0) -> None:
        self._row, self._start = row, start

    def __getitem__(self, behind: slice) -> RowSlots:
        return RowSlots(self._row, self._start + behind.start)

    def clone(self) -> torch.Tensor:
        return self._row[self._start :].to(dtype=torch.int64, copy=True)


class LeanRadixCache(RadixCache):
    """Radix cache with pages of one token, whose costs follow the new tokens and not the prefix.

    Upstream contract: ``sglang.srt.mem_cache.radix_cache.RadixCache`` at 0.5.17: ``_insert_helper`` and
    ``_match_prefix_helper`` take any node to start from; a node's value is replaced, never written to.
    ``schedule_batch.Req``: ``get_fill_ids()`` is ``full_untruncated_fill_ids[: extend_range.end]``.
    """

    def __init__(self, params: CacheInitParams) -> None:
        self._spelled: dict[int, bytes] = {}
        self._paths: dict[int, torch.Tensor] = {}
        self._kept = 0
        super().__init__(params)

    # -- what upstream calls -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self._spelled.clear()
        self.forget_paths()

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        self._spelled.pop(node.id, None)
        self._forget_path(node.id)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key = params.key
        if not self._lean or len(key) == 0 or type(key.token_ids) is not array:
            return super().match_prefix(params)
        node, matched = self._whole_nodes(key)
        below: list[torch.Tensor] = []
        last = node
        if matched < len(key):
            below, last = self._match_prefix_helper(node, key[matched:] if matched else key)
            self._touch(node, node.last_access_time)
        else:
            self._touch(node, time.monotonic())
        indices = self._joined([self._path_slots(node), *below] if matched else below)
        return MatchResult(device_indices=indices, last_device_node=last, last_host_node=last, best_match_node=last)

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        end = min(req.extend_range.end, len(req.full_untruncated_fill_ids))
        path = self._standing(req, end)
        if path is None:
            super().cache_unfinished_req(req, chunked=chunked)
            return
        node, start = req.last_node, req.cache_protected_len
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, start:end]
        before = self._path_slots(node)
        key = RadixKey(req.full_untruncated_fill_ids[start:end], req.extra_key)
        known, last = self._insert_below(req, path, key, slots, chunked)
        added = [below.value for below in self._between(node, last)]
        if known:
            # Somebody else cached these tokens first: their slots replace ours. A copy goes to the allocator, since
            # the row is written before an open free group is closed.
            self.token_to_kv_pool_allocator.free_segment(slots[:known].clone(), start_pos=start)
            theirs = torch.cat(added)[:known]
            self.req_to_token_pool.write((req.req_pool_idx, slice(start, start + known)), theirs)
        req.prefix_indices = self._joined([before, *added] if start else added)
        req.cache_protected_len = end
        self.dec_lock_ref(node)
        self.inc_lock_ref(last)
        req.last_node = last
        # Upstream matches the whole key once more; of that only the time is left.
        self._touch(last, time.monotonic())

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        end = min(kv_len_to_handle, len(req.origin_input_ids) + len(req.output_ids))
        path = self._standing(req, end)
        if path is None:
            super().cache_finished_req(req, is_insert=is_insert, kv_len_to_handle=kv_len_to_handle)
            return
        start = req.cache_protected_len
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, start:end]
        ours = end - start
        if is_insert and not self.disable_finished_insert:
            key = RadixKey(_tokens(req, start, end), req.extra_key)
            ours, _ = self._insert_below(req, path, key, slots)
        if ours:
            self.token_to_kv_pool_allocator.free_segment(slots[:ours], start_pos=start)
        self.dec_lock_ref(req.last_node)

    # -- walks ---------------------------------------------------------------------------------------------------------

    def upwards(self, node: TreeNode) -> Iterator[TreeNode]:
        """``node`` and its ancestors, the root left out, deepest first."""
        while node is not self.root_node:
            yield node
            node = node.parent

    def _between(self, node: TreeNode, last: TreeNode) -> list[TreeNode]:
        """The nodes below ``node`` down to ``last``, top first."""
        found = []
        while last is not node:
            found.append(last)
            last = last.parent
        found.reverse()
        return found

    @property
    def kept_paths(self) -> dict[int, int]:
        """Node id to slot ids kept for the whole path to it; at most :data:`KEPT_SLOTS` in all."""
        return {node_id: len(slots) for node_id, slots in self._paths.items()}

    @property
    def _lean(self) -> bool:
        return not self.disable and self.page_size == 1 and not self.is_eagle

    def _standing(self, req: Any, end: int) -> list[TreeNode] | None:
        """The path that spells the request's protected tokens, deepest first; None where upstream has to walk."""
        if not self._lean or req.last_node is None or end < req.cache_protected_len:
            return None
        path = list(self.upwards(req.last_node))
        if sum(len(node.key) for node in path) != req.cache_protected_len:
            return None
        return path if not path or path[0].key.extra_key == req.extra_key else None

    def _whole_nodes(self, key: RadixKey) -> tuple[TreeNode, int]:
        """The deepest node whose whole path ``key`` spells, and the tokens of that path. Splits nothing."""
        tokens = memoryview(key.token_ids)
        node, at, end = self.root_node, 0, len(key)
        while at < end:
            child = node.children.get(key[at].child_key())
            if child is None:
                break
            upto = at + len(child.key)
            if upto > end or not self._spelling(child).startswith(tokens[at:upto]):
                break
            node, at = child, upto
        return node, at

    def _spelling(self, node: TreeNode) -> bytes:
        """A node's tokens as bytes. A split shortens the node, which the length tells."""
        tokens = node.key.token_ids
        text = self._spelled.get(node.id)
        if text is None or len(text) != len(node.key) * tokens.itemsize:
            text = self._spelled[node.id] = node.key.raw_token_ids().tobytes()
        return text

    def _touch(self, node: TreeNode, now: float) -> None:
        for above in self.upwards(node):
            above.last_access_time = now
        self.root_node.last_access_time = now

    def _insert_below(
        self, req: Any, path: Sequence[TreeNode], key: RadixKey, slots: torch.Tensor, chunked: bool = False
    ) -> tuple[int, TreeNode]:
        """Insert ``key`` with ``slots`` below the request's last node; the path above is marked as a walk would.

        Returns:
            How many of the tokens were in the tree already, and the node that ends the key.
        """
        priority = req.priority or 0
        known, last = self._insert_helper(req.last_node, key, RowSlots(slots), priority, chunked)
        for above in path:
            above.priority = max(above.priority, priority)
            self._inc_hit_count(above, chunked)
        self.root_node.priority = max(self.root_node.priority, priority)
        self._touch(req.last_node, req.last_node.last_access_time)
        return known, last

    # -- slot ids of whole paths ---------------------------------------------------------------------------------------

    def forget_paths(self) -> None:
        """Call it whenever slots in the tree have moved."""
        self._paths.clear()
        self._kept = 0

    def _forget_path(self, node_id: int) -> None:
        slots = self._paths.pop(node_id, None)
        if slots is not None:
            self._kept -= len(slots)

    def _path_slots(self, node: TreeNode) -> torch.Tensor:
        """int64 slots of the whole path to ``node``; read only, shared. Splits leave it right, promotions do not."""
        slots = self._paths.pop(node.id, None)
        if slots is None:
            slots = self._joined([above.value for above in reversed(list(self.upwards(node)))])
            self._kept += len(slots)
        self._paths[node.id] = slots  # the last entry is the one used last
        while self._kept > KEPT_SLOTS:
            self._forget_path(next(iter(self._paths)))
        return slots

    def _joined(self, slots: list[torch.Tensor]) -> torch.Tensor:
        """One tensor of all; a single one is not copied."""
        if len(slots) < 2:
            return slots[0] if slots else self._empty_match_result.device_indices
        return torch.cat(slots)


def _tokens(req: Any, start: int, end: int) -> array[int]:
    """Tokens ``start`` to ``end`` of prompt and output, without joining the two."""
    prompt, output = req.origin_input_ids, req.output_ids
    behind = output[max(0, start - len(prompt)) : max(0, end - len(prompt))]
    return prompt[start:end] + behind if start < len(prompt) else behind
