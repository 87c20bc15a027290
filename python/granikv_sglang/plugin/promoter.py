"""Promotion at the scheduler's safe point: choose a segment, copy it, swing everything that caches its slot ids.

Who caches slot ids at the top of a scheduling step: running requests, the requests of the last batch (their prefill may
still be in flight) and the chunked request, in ``req_to_token`` and in ``prefix_indices``. Waiting requests match again
before they are admitted, retracted ones have forgotten theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import TreeNode

from granikv_kernels.copy_slots import copy_slots_reference
from granikv_sglang.config import GraniKVConfig
from granikv_sglang.core import Breaker, Counters, Decline
from granikv_sglang.plugin.ranks import RankCheck
from granikv_sglang.tree.audit import HeldRow, audit
from granikv_sglang.tree.policy import Segment, rank_segments
from granikv_sglang.tree.radix import GraniRadixCache


def live_requests(running_batch: Any, last_batch: Any, chunked_req: Any) -> list[Any]:
    """Requests that hold a row of ``req_to_token``, each once, in scheduler order.

    Under the overlap schedule a batch still lists requests that have finished and given their row back; they hold
    nothing.
    """
    batches = [batch.reqs for batch in (running_batch, last_batch) if batch is not None]
    seen: dict[str, Any] = {}
    for req in [*(req for reqs in batches for req in reqs), *([chunked_req] if chunked_req is not None else [])]:
        if req.req_pool_idx is not None and req.last_node is not None:
            seen.setdefault(req.rid, req)
    return list(seen.values())


class Promoter:
    """Looks for a prefix to promote whenever membership or the tree has changed; at most one copy per step."""

    def __init__(
        self, tree: GraniRadixCache, config: GraniKVConfig, counters: Counters, ranks: RankCheck | None = None
    ) -> None:
        self._tree = tree
        self._config = config
        self._counters = counters
        self._looked_at: object = None
        self._declined: set[tuple[int, Decline]] = set()
        self._copy = _copier(tree)
        self._ranks = ranks
        self._breaker = Breaker("promotion", "prefixes stay COLD and are served as before")

    def at_safe_point(self, scheduler: Any, running_batch: Any, last_batch: Any) -> None:
        """Promote one segment if one qualifies. Called before the scheduler prepares a batch."""
        reqs = live_requests(running_batch, last_batch, scheduler.chunked_req)
        key = (self._tree.epoch, tuple((req.rid, req.last_node.id) for req in reqs))
        if key != self._looked_at:
            self._looked_at = key
            if len(reqs) >= self._config.min_sharers and self._config.hot == "on":
                self._promote_best(scheduler, reqs)
        if self._config.audit:
            self.audit(reqs)

    def audit(self, reqs: list[Any]) -> None:
        """Prove slot conservation with ``reqs`` live; raises AuditError."""
        held = [
            HeldRow(r.req_pool_idx, r.cache_protected_len, r.kv.kv_allocated_len, r.last_node) for r in reqs if r.kv
        ]
        audit(self._tree, held, self._tree.req_to_token_pool.req_to_token)

    def _promote_best(self, scheduler: Any, reqs: list[Any]) -> None:
        views = self._tree.views((req.last_node, _steps_left(req)) for req in reqs)
        segments, declines = rank_segments(
            views,
            min_tokens=self._config.min_tokens,
            min_sharers=self._config.min_sharers,
            min_segment=self._config.min_segment,
        )
        for node_id, reason in declines:
            self._decline(node_id, reason)
        if not segments:
            return
        if self._breaker.off:
            self._decline(segments[0].node_ids[0], Decline.SWITCHED_OFF)
            return
        # Reserved here and not on the forward stream: where free slots must be read, the host waits for the stream.
        found = self._place_for(segments)
        if found is None:
            self._turned_down(segments[0], Decline.NO_ROOM)
            return
        segment, tokens, start = found
        holder = self._holder(reqs, segment)
        in_part = tokens < segment.tokens
        if in_part:
            segment = self._tree.leading_part(segment, holder, tokens)
        with _forward_stream(scheduler):
            outcome = self._tree.promote(segment, holder, self._copy_on_all_ranks, start)
            if isinstance(outcome, Decline):
                self._turned_down(segment, outcome)
                return
            offset, old, new = outcome
            self._counters.partial_promotions += in_part
            self._note("promoted", offset, segment.tokens, start)
            self._swing(reqs, segment, offset, new)
        self._tree.allocator.free(old)

    def _place_for(self, segments: Sequence[Segment]) -> tuple[Segment, int, int] | None:
        """What to promote of which segment, and the first slot of a run reserved for it: ``(segment, tokens, start)``.

        The segment worth most gets a run for all of it, by eviction if need be. Where there is none, as much of it as
        the longest free run takes, or the least that is worth an extent, by eviction again: its old slots make room for
        the rest at the next step. Where not even that is to be had, the next segments are asked for what is free.
        """
        first, min_segment = segments[0], self._config.min_segment
        start = self._tree.reserve(first.tokens)
        if start is not None:
            return first, first.tokens, start
        least = first.part(first.least_part(min_segment), min_segment)
        if self._tree.room() < least < first.tokens:
            start = self._tree.reserve(least)
            if start is not None:
                return first, least, start
        room = self._tree.room()
        for segment in segments:
            tokens = segment.part(room, min_segment)
            if tokens:
                start = self._tree.reserve(tokens)
                assert start is not None, "a run that is known to be free"
                return segment, tokens, start
        return None

    def _holder(self, reqs: Sequence[Any], segment: Segment) -> TreeNode:
        """The last node of a live request that holds all of ``segment``."""
        deepest = segment.node_ids[-1]
        return next(
            req.last_node for req in reqs if any(node.id == deepest for node in self._tree.upwards(req.last_node))
        )

    def _turned_down(self, segment: Segment, reason: Decline) -> None:
        self._decline(segment.node_ids[0], reason)
        self._note(f"declined {reason.value}", segment.tokens)

    def _copy_on_all_ranks(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy, and raise where any rank's copy failed: the ranks' slots stay the same."""
        failed: Exception | None = None
        try:
            self._copy(source, destination)
        except Exception as error:
            failed = error
        if self._ranks is not None and not self._ranks.all_well(failed is None) and failed is None:
            failed = RuntimeError("the copy failed on another rank")
        if failed is not None:
            self._breaker.fault(failed)
            raise failed

    def _note(self, what: str, *numbers: int) -> None:
        if self._ranks is not None:
            self._ranks.note(what, *numbers)

    def _decline(self, node_id: int, reason: Decline) -> None:
        """Count a decline once per node and reason, or a busy batch would count the same prefix at every arrival."""
        if (node_id, reason) in self._declined:
            return
        if len(self._declined) >= 4096:
            self._declined.clear()
        self._declined.add((node_id, reason))
        self._counters.declines[reason] += 1

    def _swing(self, reqs: list[Any], segment: Segment, offset: int, new: torch.Tensor) -> None:
        req_to_token = self._tree.req_to_token_pool.req_to_token
        wanted, as_in_row = set(segment.node_ids), new.to(req_to_token.dtype)
        for req in reqs:
            held = sum(len(node.key) for node in self._tree.upwards(req.last_node) if node.id in wanted)
            if held == 0:
                continue
            req_to_token[req.req_pool_idx, offset : offset + held] = as_in_row[:held]
            cached = req.prefix_indices
            if len(cached) > offset:
                upto = min(len(cached), offset + held)
                # A new tensor: a kernel launched earlier may still read the old one.
                req.prefix_indices = torch.cat([cached[:offset], new[: upto - offset], cached[upto:]])


def _steps_left(req: Any) -> int:
    return max(0, req.sampling_params.max_new_tokens - len(req.output_ids))


def _copier(tree: GraniRadixCache) -> Callable[[torch.Tensor, torch.Tensor], None]:
    pool = tree.allocator.get_kvcache()
    buffers = [*pool.k_buffer, *pool.v_buffer]
    if buffers[0].is_cuda:
        # One launch for all layers. Imported here: Triton has no use on a CPU.
        from granikv_kernels.copy_slots.launch import SlotCopier  # noqa: PLC0415

        return SlotCopier(buffers).copy

    def copy(source: torch.Tensor, destination: torch.Tensor) -> None:
        copy_slots_reference(buffers, source, destination)

    return copy


def _forward_stream(scheduler: Any) -> AbstractContextManager[Any]:
    """Order copy and swing by stream: behind the forward in flight, before the next one.

    Under the overlap schedule the forward of the last batch may still run: it reads the old slots, which nothing writes
    before a later forward on that same stream. On the CPU everything is in program order already.
    """
    if scheduler.device != "cuda" or not scheduler.enable_overlap:
        return nullcontext()
    return _OnForwardStream(scheduler)


class _OnForwardStream:
    def __init__(self, scheduler: Any) -> None:
        self._forward, self._schedule = scheduler.forward_stream, scheduler.schedule_stream
        self._context = torch.cuda.stream(self._forward)

    def __enter__(self) -> None:
        self._forward.wait_stream(self._schedule)
        self._context.__enter__()

    def __exit__(self, *details: Any) -> None:
        self._context.__exit__(*details)
        # Tree and row reads that follow on the schedule stream must see the swing.
        self._schedule.wait_stream(self._forward)
