"""Launch side of the CUDA prefix kernel: plan on the host, run under or outside a CUDA graph."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from granikv_kernels.grouped_prefix_cuda.build import TailParams, check, load
from granikv_kernels.grouped_prefix_cuda.planner import Grid, Worklist, plan_worklist, unit_rows
from granikv_kernels.grouped_prefix_cuda.variants import DEFAULT, FUSED, Variant, variant_table

_RING = 4  # pinned buffers in turn: a copy still in flight keeps its buffer while the host plans the next batch
_DTYPES = {torch.bfloat16: 0, torch.float16: 1}
_MAX_TAIL_ROWS, _MAX_TAIL_GQA, _TAIL_WARPS = 384, 8, 3  # TailShape in csrc/tail.cuh


@dataclass(frozen=True)
class Tails:
    """Where the rows' private tokens are, on the device: positions ``coverage[row] .. seq_lens[row]`` of
    ``req_to_token[req_index[row]]``. Both index tensors int32 or both int64."""

    req_to_token: torch.Tensor  # int32 [requests, context]
    req_index: torch.Tensor  # [rows]
    seq_lens: torch.Tensor  # [rows]


class GroupedPrefixCuda:
    """Buffers and launches for one (heads, head size, type) on one GPU. All layers share it, one stream at a time.

    ``plan`` writes the work list (pinned memory, asynchronous copy, no synchronisation); ``run`` and ``merge`` only
    launch, so they may be captured, and a replay sees what the last ``plan`` copied.
    """

    def __init__(
        self,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        max_pairs: int,
        device: torch.device | str = "cuda",
        tails: bool = False,
        variant: Variant | None = None,
        partial_dtype: torch.dtype = torch.float32,
        max_partial_mib: int = 256,
        max_rounds: int = 32,
        trials: bool = False,
    ) -> None:
        if dtype not in _DTYPES or q_heads % kv_heads or q_heads > 256 or head_dim not in DEFAULT:
            raise ValueError(f"unsupported: {dtype}, {q_heads}/{kv_heads} heads of {head_dim}")
        self.q_heads, self.kv_heads, self.head_dim, self.dtype = q_heads, kv_heads, head_dim, dtype
        self.gqa = q_heads // kv_heads
        self.device = torch.device(device)
        self.variant = variant or (FUSED if tails else DEFAULT)[head_dim]
        self._variant_id = variant_table(trials).index(self.variant)
        self._lib = load(trials)
        self._part_half = int(partial_dtype != torch.float32)
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        ctas = sms * self.variant.ctas_per_sm // self.variant.cluster * self.variant.cluster
        self.grid = Grid(ctas, self.variant.cluster, self.variant.tile_m, self.variant.tile_n)
        self.max_rounds, self.max_pairs = max_rounds, max_pairs

        # One buffer: offsets, entries, coverage, units | rows of the units. One copy a plan for each side of the bar.
        self._at_entries = _align(max_pairs + 1)
        self._at_coverage = self._at_entries + _align(4 * max_pairs)
        self._at_units = self._at_coverage + _align(max_pairs)
        self._at_rows = self._at_units + _align((max_rounds + 1) * ctas * 8)
        words = self._at_rows + (max_rounds + 1) * ctas * self.variant.tile_m
        self._table = torch.zeros(words, dtype=torch.int32, device=self.device)
        self._host = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._copied = [torch.cuda.Event() for _ in range(_RING)]
        self._turn = 0
        self._maps: dict[tuple[int, ...], ctypes.Array[ctypes.c_char]] = {}

        self.max_partial_rows = max_partial_mib * 2**20 // (head_dim * partial_dtype.itemsize)
        tail_rows = (ctas * _TAIL_WARPS + max_pairs * kv_heads) * self.gqa if self.variant.tail_ring else 0
        self._arrivals = torch.zeros(1, dtype=torch.int64, device=self.device)  # the fused launch's grid barrier
        rows = self.max_partial_rows + tail_rows  # the tails' partial results follow the items'
        self.part_out = torch.empty((rows, head_dim), dtype=partial_dtype, device=self.device)
        self.part_lse = torch.empty(rows, dtype=torch.float32, device=self.device)
        self.worklist: Worklist | None = None
        with torch.cuda.device(self.device):  # loads the kernels now: the first launch may be under capture
            none = [None] * 7
            code = self._lib.granikv_prefix(
                self._variant_id, _DTYPES[dtype], self._part_half, *none, 0, 1, 0, 0, 1.0, *none[:6], q_heads, None
            )
            check(self._lib, code, "prefix kernel")
            code = self._lib.granikv_merge(
                head_dim, _DTYPES[dtype], self._part_half, *none, None, 0, q_heads, self.gqa, 0, None
            )
            check(self._lib, code, "merge kernel")

    def plan(
        self,
        item_start: Sequence[int],
        item_len: Sequence[int],
        member_rows: Sequence[Sequence[int] | np.ndarray],
        rows: int | None = None,
        coverage: Sequence[int] | np.ndarray | None = None,
    ) -> Worklist:
        """Set the items. With ``rows`` the merge groups are the batch's rows, else the (item, member) pairs.

        ``coverage``: per row, the leading tokens that its items cover; its tail starts there.
        """
        members = np.array([len(m) for m in member_rows], dtype=np.int64)
        flat = (
            np.concatenate([np.asarray(m, dtype=np.int64) for m in member_rows])
            if len(member_rows)
            else np.zeros(0, int)
        )
        pairs = flat.size
        work = plan_worklist(item_start, item_len, members, self.kv_heads, self.gqa, self.grid)
        if pairs > self.max_pairs or (rows or 0) > self.max_pairs:
            raise ValueError(f"{pairs} (item, member) pairs, room for {self.max_pairs}")
        if work.units.shape[0] > self.max_rounds or work.partial_rows > self.max_partial_rows:
            raise ValueError(
                f"{work.units.shape[0]} rounds and {work.partial_rows} partial rows do not fit the buffers"
            )
        turn = self._turn = (self._turn + 1) % _RING
        self._copied[turn].synchronize()  # a plan four plans ago: done long since, or the host is four steps ahead
        host = self._host[turn].numpy()
        groups = pairs if rows is None else rows
        if rows is None:
            host[: groups + 1] = np.arange(groups + 1)
            order = np.arange(pairs)
        else:
            order = np.argsort(flat, kind="stable")
            host[: groups + 1] = np.searchsorted(flat[order], np.arange(groups + 1))
        host[groups + 1 : self._at_entries] = pairs  # padding groups are empty
        host[self._at_entries : self._at_entries + 4 * pairs] = work.entries[order].reshape(-1)
        covered = np.zeros(0, dtype=np.int32) if coverage is None else np.asarray(coverage, dtype=np.int32)
        host[self._at_coverage : self._at_coverage + covered.size] = covered
        host[self._at_coverage + covered.size : self._at_units] = 0
        used = self._at_units + work.units.size
        host[self._at_units : used] = work.units.reshape(-1)
        self._table[:used].copy_(self._host[turn][:used], non_blocking=True)
        sources = unit_rows(work.units, flat, self.gqa, self.grid.tile_m)
        used = self._at_rows + sources.size
        host[self._at_rows : used] = sources.reshape(-1)
        self._table[self._at_rows : used].copy_(self._host[turn][self._at_rows : used], non_blocking=True)
        self._copied[turn].record()
        self.worklist = work
        return work

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        sm_scale: float,
        tails: Tails | None = None,
        out: torch.Tensor | None = None,
        out_lse: torch.Tensor | None = None,
    ) -> None:
        """Launch the prefix pass; results stay in the partial buffers for :meth:`merge`.

        With ``tails`` the same launch does the private tails and the merge too, and fills ``out [rows, q_heads,
        head_dim]`` (and ``out_lse``); the plan must have been made with ``rows`` and ``coverage``.
        """
        if q.dtype != self.dtype or q.stride(-1) != 1 or q.stride(-2) != self.head_dim or q.stride(0) % 8:
            raise ValueError("q must be [rows, q_heads, head_dim] with dense heads, in the type given at construction")
        if (tails is None) != (out is None) or (out is not None and out.shape != q.shape):
            raise ValueError("tails and out, of q's shape, go together")
        if not (out is None or out.is_contiguous()) or not (out_lse is None or out_lse.is_contiguous()):
            raise ValueError("out and out_lse must be contiguous")
        base = self._table.data_ptr()
        tail = None if tails is None else self._tail_params(q, k_cache, v_cache, tails)
        code = self._lib.granikv_prefix(
            self._variant_id,
            _DTYPES[self.dtype],
            self._part_half,
            self._map(k_cache),
            self._map(v_cache),
            q.data_ptr(),
            base + 4 * self._at_units,
            base + 4 * self._at_rows,
            self.part_out.data_ptr(),
            self.part_lse.data_ptr(),
            q.stride(0),
            self.gqa,
            self.max_rounds + 1,
            self.grid.ctas,
            sm_scale * math.log2(math.e),
            None if tail is None else ctypes.addressof(tail),
            base,
            base + 4 * self._at_entries,
            _address(out),
            _address(out_lse),
            self._arrivals.data_ptr(),
            self.q_heads,
            torch.cuda.current_stream(self.device).cuda_stream,
        )
        check(self._lib, code, "prefix kernel")

    def merge(
        self,
        out: torch.Tensor,
        out_lse: torch.Tensor | None = None,
        own_out: torch.Tensor | None = None,
        own_lse: torch.Tensor | None = None,
        overlap: bool = True,
    ) -> None:
        """Merge the partial states of every group, and ``own`` (a tail's state) where given, into ``out``."""
        base = self._table.data_ptr()
        for name, t in (("out", out), ("out_lse", out_lse), ("own_out", own_out), ("own_lse", own_lse)):
            if t is not None and not t.is_contiguous():
                raise ValueError(f"{name} must be contiguous")
        code = self._lib.granikv_merge(
            self.head_dim,
            _DTYPES[self.dtype],
            self._part_half,
            self.part_out.data_ptr(),
            self.part_lse.data_ptr(),
            base,
            base + 4 * self._at_entries,
            _address(own_out),
            _address(own_lse),
            out.data_ptr(),
            _address(out_lse),
            out.shape[0],
            self.q_heads,
            self.gqa,
            int(overlap),
            torch.cuda.current_stream(self.device).cuda_stream,
        )
        check(self._lib, code, "merge kernel")

    def _tail_params(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tails: Tails) -> TailParams:
        rows, index, lens = q.shape[0], tails.req_index, tails.seq_lens
        if not self.variant.tail_ring or rows > min(_MAX_TAIL_ROWS, self.max_pairs) or self.gqa > _MAX_TAIL_GQA:
            raise ValueError("tails need tails=True, at most 384 rows and 8 query heads a KV head")
        if index.dtype != lens.dtype or lens.dtype not in (torch.int32, torch.int64) or k.stride(0) != v.stride(0):
            raise ValueError("req_index and seq_lens must be of one integer type; K and V of one slot stride")
        if tails.req_to_token.dtype != torch.int32 or index.stride(0) != 1 or lens.stride(0) != 1:
            raise ValueError("req_to_token must be int32, the index tensors dense")
        return TailParams(
            k.data_ptr(),
            v.data_ptr(),
            tails.req_to_token.data_ptr(),
            index.data_ptr(),
            lens.data_ptr(),
            self._table.data_ptr() + 4 * self._at_coverage,
            tails.req_to_token.stride(0),
            k.stride(0),
            rows,
            self.kv_heads,
            self.max_partial_rows,
            int(lens.dtype == torch.int64),
        )

    def _map(self, cache: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
        key = (cache.data_ptr(), *cache.shape, cache.stride(0))
        found = self._maps.get(key)
        if found is None:
            if cache.shape[1:] != (self.kv_heads, self.head_dim) or cache.stride()[1:] != (self.head_dim, 1):
                raise ValueError(f"cache must be [slots, {self.kv_heads}, {self.head_dim}] with dense rows")
            found = ctypes.create_string_buffer(128 + 64)
            aligned = -ctypes.addressof(found) % 64  # the map itself must lie on 64 bytes
            view = (ctypes.c_char * 128).from_buffer(found, aligned)
            code = self._lib.granikv_make_map(
                ctypes.addressof(view),
                cache.data_ptr(),
                cache.shape[0],
                self.kv_heads,
                self.head_dim,
                cache.stride(0) * cache.itemsize,
                self.variant.box_rows,
                _DTYPES[self.dtype],
            )
            check(self._lib, code, "tensor map")
            found = self._maps[key] = view
        return found


def _align(words: int) -> int:
    return -(-words // 64) * 64


def _address(t: torch.Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
