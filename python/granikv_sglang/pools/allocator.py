"""The COLD allocator with HOT runs carved out of it: one index space, no slot reserved for either side.

Thin adapter over SGLang's token-level allocator; its free list stays the single record of what is free.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

from granikv_sglang.pools.runs import KnownFree, runs_of

STALE_SHARE = 64
"""What the host knows of free runs is read anew once so large a part of the pool (its size over this) has come free
since: a promotion would else not find the highest run, and HOT would creep down into COLD."""

RESORT_TOKENS = 4096
"""Tokens handed out between two merges of freed slots into the sorted list. The lowest free slots go first up to this
slack; sorting a million ids takes about 0.1 ms on an H200, so once per 4096 tokens is under 1% of a decode step."""


class ElasticAllocator(TokenToKVPoolAllocator):
    """Token-level allocator that hands out low slots first and can carve a contiguous aligned run from the top.

    Upstream contract: ``sglang.srt.mem_cache.allocator.TokenToKVPoolAllocator`` at 0.5.17 (slot 0 is the padding slot;
    ``free_pages`` and ``release_pages`` are int64 on the pool's device).
    """

    def __init__(self, size: int, dtype: torch.dtype, device: str, kvcache: object) -> None:
        # need_sort keeps freed slots apart in release_pages until they are merged in order.
        super().__init__(size, dtype, device, kvcache, need_sort=True)

    free_pages: torch.Tensor
    release_pages: torch.Tensor

    def clear(self) -> None:
        super().clear()
        self._handed_out = 0
        self._ascending = True
        self._known, self._came_free = KnownFree([(1, self.size)]), 0

    def alloc(self, need_size: int) -> torch.Tensor | None:
        self._handed_out += need_size
        if self._handed_out > RESORT_TOKENS:
            self.merge_and_sort_free()
            self._handed_out = need_size
        elif need_size > len(self.free_pages):
            self._append_freed()
        self._known.hand_out(need_size)
        return super().alloc(need_size)

    def free(self, free_index: torch.Tensor) -> None:
        self._came_free += free_index.numel()
        super().free(free_index)

    def merge_and_sort_free(self) -> None:
        if len(self.release_pages) or not self._ascending:
            self._append_freed()
            self.free_pages = self.free_pages.sort().values
            self._ascending = True

    def _append_freed(self) -> None:
        """Freed slots behind the free ones, in the order they came.

        In a full pool only what was evicted last is left to hand out, and sorting that in each time takes 44 µs on an
        H200; where eviction leaves little (a small pool, a large batch), at every decode step.
        """
        if len(self.release_pages):
            self.free_pages = torch.cat((self.free_pages, self.release_pages))
            self.release_pages = self.release_pages[:0]
            self._ascending = False

    def free_slots(self) -> torch.Tensor:
        """Every free slot, ascending int64. Frees waiting in an open free group are not in it."""
        self.merge_and_sort_free()
        return self.free_pages

    def peek_free(self) -> torch.Tensor:
        """As :meth:`free_slots`, but only looks: what is handed out next does not depend on who reads the state."""
        return torch.cat([self.free_pages, self.release_pages]).sort().values

    def alloc_run(self, length: int, align: int) -> int | None:
        """Take ``length`` consecutive slots starting at a multiple of ``align``, the highest known to be free.

        Returns the first slot, or None when no free run is long enough (nothing changes then). Waits for the device
        only where what the host knows is not enough: it then reads the list of free runs. For promotions, never per
        step. Give the run back with ``free``.
        """
        fresh = self._came_free * STALE_SHARE < self.size
        start = self._known.take_run(length, align) if fresh else None
        if start is None:
            self._known, self._came_free = KnownFree(runs_of(self.free_slots())), 0
            start = self._known.take_run(length, align)
        if start is not None:
            free = self.free_pages
            inside = ((free >= start) & (free < start + length)).byte()
            # The others in their order. A mask alone would make the host wait for how many there are.
            self.free_pages = free[inside.sort(stable=True).indices[: len(free) - length]]
        return start

    def longest_known_run(self, align: int) -> int:
        """Slots in the longest free run from a multiple of ``align`` on, as far as the host knows.

        That is all of them right after :meth:`alloc_run` has found none.
        """
        return self._known.longest(align)

    def largest_free_run(self) -> int:
        """Length of the longest free run, in slots. Synchronises with the device."""
        return max((length for _, length in runs_of(self.peek_free())), default=0)
