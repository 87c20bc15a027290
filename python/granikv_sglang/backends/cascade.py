"""The cascade engine: FlashInfer's paged kernels over items and tails, merged by log-sum-exp, safe in CUDA graphs.

Thin adapter of FlashInfer and of SGLang's plan for it that waits for nothing. Upstream contract: FlashInfer 0.6.15's
``BatchPrefillWithPagedKVCacheWrapper`` in CUDA-graph mode, and ``fast_prefill_plan`` of SGLang 0.5.17.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan

from granikv_kernels.cascade.launch import extent_slots, gather_rows, merge_listed, tail_slots
from granikv_kernels.grouped_decode.arena import Arena
from granikv_sglang.backends.base import DecodeBatch, Geometry, SharedDecode
from granikv_sglang.backends.cascade_plan import (
    CascadeCapacity,
    Ints,
    PassLimits,
    PrefixArrays,
    largest_arrays,
    prefix_arrays,
    tail_indptr,
)
from granikv_sglang.plan import Capacity, Plan


class Scratch:
    """Buffers that passes of every size share: each is as large as the largest pass so far asked for.

    A graph keeps what it was captured with; SGLang captures the largest batch first, so the rest are views of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """``[size]`` of the buffer called ``name``; zeros where it is new."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < size:
            buffer = self._buffers[name] = torch.zeros(size, dtype=dtype, device=self._device)
        return buffer[:size]

    @property
    def bytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self._buffers.values())

    def poison(self) -> None:
        """Fill every float buffer with NaN, FlashInfer's workspace included (tests)."""
        for buffer in self._buffers.values():
            if buffer.dtype is torch.uint8:
                buffer[: buffer.shape[0] // 4 * 4].view(torch.float32).fill_(float("nan"))
            elif buffer.dtype.is_floating_point:
                buffer.fill_(float("nan"))


class PagedPass:
    """One FlashInfer wrapper: requests with several queries each, no mask, pages of one slot.

    Args:
        geometry: attention shapes.
        qo_indptr, kv_indptr: device buffers, int32 ``[requests + 1]``, filled by the caller before every run.
        slots: device buffer, int32, the slots of all requests.
        largest: ``(qo_indptr, kv_indptr)`` on the host of the plan with the most queries; it fixes the grid.
        scratch: gives FlashInfer's workspace, which passes share since they run one after the other.
    """

    def __init__(
        self,
        geometry: Geometry,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        slots: torch.Tensor,
        largest: tuple[Ints, Ints],
        scratch: Scratch,
    ) -> None:
        g, device = geometry, geometry.device
        self._qo_indptr, self._kv_indptr, self._no_slots = qo_indptr, kv_indptr, slots[:0]
        self._page_lens = torch.ones(qo_indptr.shape[0] - 1, dtype=torch.int32, device=device)
        self._heads = (g.q_heads, g.kv_heads, g.head_dim, 1)
        self._types = {"q_data_type": g.dtype, "kv_data_type": g.dtype, "o_data_type": g.dtype}
        # FlashAttention-2: FlashInfer's code for Hopper does not split a long item, so few items would leave SMs idle.
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(256, dtype=torch.uint8, device=device), "NHD", use_cuda_graph=True,
            qo_indptr_buf=qo_indptr, paged_kv_indptr_buf=kv_indptr, paged_kv_indices_buf=slots,
            paged_kv_last_page_len_buf=self._page_lens, backend="fa2",
        )  # fmt: skip
        host = (*(torch.from_numpy(x) for x in largest), self._no_slots, torch.ones_like(self._page_lens, device="cpu"))
        floats, ints = self._wrapper.workspace_size(*host, *self._heads, **self._types)
        self._wrapper.reset_workspace_buffer(
            scratch.take("workspace", floats + 1024, torch.uint8),
            torch.empty(ints + 1024, dtype=torch.uint8, device=device),
        )
        # The scale is given to each run: plan() would fix it here.
        self._wrapper.plan(*host, *self._heads, sm_scale=1.0, **self._types)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._mark()

    def plan(self, qo_indptr: Ints, kv_indptr: Ints) -> None:
        """Plan on the host and copy to the device asynchronously; the device buffers hold the same two arrays."""
        if self._copied is not None and not self._copied.query():
            # FlashInfer's pinned array is still on its way from the plan before: only when the host is far ahead.
            self._copied.synchronize()
        kv_lens = np.diff(kv_indptr)
        fast_prefill_plan(
            self._wrapper, self._qo_indptr, self._kv_indptr, self._no_slots, self._page_lens, *self._heads,
            **self._types, qo_indptr_host=torch.from_numpy(qo_indptr), kv_indptr_host=torch.from_numpy(kv_indptr),
            kv_lens_host=torch.from_numpy(kv_lens), max_q_len=int(np.diff(qo_indptr).max()),
            max_kv_len=int(kv_lens.max()),
        )  # fmt: skip
        self._mark()

    def _mark(self) -> None:
        if self._copied is not None:
            self._copied.record()

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        sm_scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Launch; ``out`` as q, ``lse [queries, q_heads]`` in base 2."""
        pages = (k_cache.unsqueeze(1), v_cache.unsqueeze(1))
        self._wrapper.run(q, pages, q_scale=sm_scale, out=out, lse=lse, return_lse=True)


class CascadePass:
    """Everything that a batch of ``limits.rows`` rows needs: both passes, index arrays and partial states.

    Args:
        geometry: attention shapes.
        limits: rows, items and pairs.
        slots: slots of the KV pool.
        context: width of ``req_to_token``.
        scratch: shared buffers.
    """

    def __init__(self, geometry: Geometry, limits: PassLimits, slots: int, context: int, scratch: Scratch) -> None:
        self.limits = limits
        rows, requests, pairs = limits.rows, limits.requests, limits.pairs
        heads, dim = geometry.q_heads, geometry.head_dim
        sizes = {
            "count": 1,
            "qo": requests + 1,
            "kv": requests + 1,
            "starts": requests,
            "coverage": rows,
            "first_row": requests,
        }
        sizes |= {"list_ptr": rows + 1, "list_part": pairs + rows, "pair_row": pairs}
        self._arena = Arena(sizes, geometry.device)
        self._tail_arena = Arena({"qo": rows + 1, "kv": rows + 1}, geometry.device)
        self._item_slots = scratch.take("item_slots", slots, torch.int32)
        self._tail_slots = scratch.take("tail_slots", rows * context, torch.int32)
        self._q = scratch.take("q", pairs * heads * dim, geometry.dtype).view(pairs, heads, dim)
        states = pairs + rows
        self._part_out = scratch.take("part_out", states * heads * dim, geometry.dtype).view(states, heads, dim)
        self._part_lse = scratch.take("part_lse", states * heads, torch.float32).view(states, heads)
        self.lse = scratch.take("lse", rows * heads, torch.float32).view(rows, heads)
        largest = largest_arrays(limits)
        one_each = np.arange(rows + 1, dtype=np.int32)
        self._prefix = PagedPass(
            geometry, self._arena["qo"], self._arena["kv"], self._item_slots, (largest.qo_indptr, largest.kv_indptr),
            scratch,
        )  # fmt: skip
        self._tails = PagedPass(
            geometry, self._tail_arena["qo"], self._tail_arena["kv"], self._tail_slots, (one_each, one_each), scratch
        )
        self._pairs = pairs
        self._rows = rows

    def plan_prefix(self, arrays: PrefixArrays, coverage: Ints, paged: DecodeBatch | None = None) -> None:
        """Set the items of the next passes; ``paged`` holds the slots of items that are token positions."""
        full = np.zeros(self.limits.rows, np.int32)
        full[: coverage.shape[0]] = coverage
        self._pairs = arrays.pairs
        self._arena.upload(
            {
                "count": np.array([arrays.pairs], np.int32),
                "qo": arrays.qo_indptr,
                "kv": arrays.kv_indptr,
                "starts": arrays.starts,
                "first_row": arrays.first_row,
                "coverage": full,
                "list_ptr": arrays.list_ptr,
                "list_part": arrays.list_part,
                "pair_row": arrays.pair_row,
            }
        )
        if paged is None:
            extent_slots(self._arena["starts"], self._arena["kv"], self._item_slots)
        else:
            # All members of an item hold the same slots: its first one's row of the table has them.
            requests = paged.req_pool_indices[self._arena["first_row"].long()]
            tail_slots(paged.req_to_token, requests, self._arena["starts"], self._arena["kv"], self._item_slots)
        self._prefix.plan(arrays.qo_indptr, arrays.kv_indptr)

    def plan_tails(self, seq_lens: npt.NDArray[np.int64], coverage: Ints) -> None:
        """Set the tails of this pass: ``seq_lens [n]``, n at most the rows."""
        self._rows = seq_lens.shape[0]
        qo = np.minimum(np.arange(self.limits.rows + 1, dtype=np.int32), self._rows)
        kv = tail_indptr(seq_lens, coverage, self.limits.rows)
        self._tail_arena.upload({"qo": qo, "kv": kv})
        self._tails.plan(qo, kv)

    def list_tails(self, batch: DecodeBatch) -> None:
        """Launch, once a pass: the slots of all tails."""
        tail_slots(
            batch.req_to_token, batch.req_pool_indices, self._arena["coverage"], self._tail_arena["kv"],
            self._tail_slots,
        )  # fmt: skip

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float) -> torch.Tensor:
        """Launch one layer."""
        self.run_prefix(q, k_cache, v_cache, sm_scale)
        self.run_tails(q, k_cache, v_cache, sm_scale)
        return self.run_merge(q)

    def run_prefix(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float) -> None:
        """The prefix pass alone: a state for every (item, member)."""
        pairs = slice(0, self._pairs)
        gather_rows(q, self._arena["pair_row"], self._arena["count"], self._q[pairs])
        self._prefix.run(self._q[pairs], k_cache, v_cache, sm_scale, self._part_out[pairs], self._part_lse[pairs])

    def run_tails(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float) -> None:
        """The tail pass alone: a state for every row."""
        own = slice(self.limits.pairs, self.limits.pairs + self._rows)
        self._tails.run(q, k_cache, v_cache, sm_scale, self._part_out[own], self._part_lse[own])

    def run_merge(self, q: torch.Tensor) -> torch.Tensor:
        """The merge alone; ``q`` gives shape and type of the output."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        merge_listed(self._arena["list_ptr"], self._arena["list_part"], self._part_out, self._part_lse, out, self.lse)
        return out


class CascadeSharedDecode(SharedDecode):
    """See :class:`granikv_sglang.backends.base.SharedDecode`. A plan without items is taken for a graph's capture.

    Passes are kept per batch size: a graph is bound to its own. A batch size without a graph gets the pass of the next
    power of two.

    Args:
        geometry: attention shapes of this rank; see :func:`cascade_takes`.
        max_rows: the largest batch, padding included.
        slots: slots of the KV pool.
        paged: an item's ``start`` is a token position of its members, and its slots may lie anywhere.
    """

    graph_safe = True

    def __init__(self, geometry: Geometry, max_rows: int, slots: int, paged: bool = False) -> None:
        self.capacity: Capacity | None = CascadeCapacity.of(max_rows)
        self._geometry = geometry
        self._slots = slots
        self._paged = paged
        self.scratch = Scratch(geometry.device)
        self._passes: dict[int, CascadePass] = {}
        self._planned: tuple[int, int] | None = None
        self.current: CascadePass | None = None
        """The pass prepared last."""
        self._batch: DecodeBatch | None = None

    def prepare(self, plan: Plan, batch: DecodeBatch) -> None:
        rows = batch.seq_lens.shape[0]
        one = self._pass_for(rows, batch.req_to_token.shape[1], capture=not plan.items)
        key = (one.limits.rows, plan.version)
        if key != self._planned:
            # One buffer of item slots serves all sizes, so a pass planned before another was is not planned any more.
            self._planned = None
            arrays = prefix_arrays(plan.items, one.limits) if plan.items else largest_arrays(one.limits)
            one.plan_prefix(arrays, plan.coverage, batch if self._paged and plan.items else None)
            self._planned = key
        lens = batch.seq_lens.cpu() if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        one.plan_tails(lens.numpy().astype(np.int64), plan.coverage)
        self.current, self._batch = one, batch

    def _pass_for(self, rows: int, context: int, capture: bool) -> CascadePass:
        size = rows if capture or rows in self._passes else 1 << (rows - 1).bit_length()
        if size not in self._passes:
            limits = PassLimits(size, self._geometry.q_heads // self._geometry.kv_heads)
            self._passes[size] = CascadePass(self._geometry, limits, self._slots, context, self.scratch)
        return self._passes[size]

    def begin(self) -> None:
        assert self.current is not None and self._batch is not None
        self.current.list_tails(self._batch)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float) -> torch.Tensor:
        assert self.current is not None
        return self.current.run(q, k_cache, v_cache, sm_scale)

    @property
    def lse(self) -> torch.Tensor:
        """float32 ``[rows, q_heads]`` of the last layer run, base 2."""
        assert self.current is not None
        return self.current.lse
