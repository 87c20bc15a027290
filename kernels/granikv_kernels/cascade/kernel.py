"""Triton kernels around a paged attention kernel. Counts are read from device memory: a graph replays other plans."""

import triton
import triton.language as tl


@triton.jit
def extent_slots_kernel(start_ptr, indptr_ptr, out_ptr, BLOCK: tl.constexpr):
    """Item ``program_id(0)``: ``out[indptr[i] + j] = start[i] + j``; ``program_id(1)`` strides over blocks of j."""
    item = tl.program_id(0)
    begin = tl.load(indptr_ptr + item)
    count = tl.load(indptr_ptr + item + 1) - begin
    start = tl.load(start_ptr + item)
    for at in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        j = at + tl.arange(0, BLOCK)
        tl.store(out_ptr + begin + j, start + j, mask=j < count)


@triton.jit
def tail_slots_kernel(table_ptr, table_stride, request_ptr, coverage_ptr, indptr_ptr, out_ptr, BLOCK: tl.constexpr):
    """Row ``program_id(0)``: ``out[indptr[r] + j] = table[request[r], coverage[r] + j]``, blocks strided as above."""
    row = tl.program_id(0)
    begin = tl.load(indptr_ptr + row)
    count = tl.load(indptr_ptr + row + 1) - begin
    source = table_ptr + tl.load(request_ptr + row).to(tl.int64) * table_stride + tl.load(coverage_ptr + row)
    for at in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        j = at + tl.arange(0, BLOCK)
        live = j < count
        tl.store(out_ptr + begin + j, tl.load(source + j, mask=live, other=0), mask=live)


@triton.jit
def gather_rows_kernel(q_ptr, q_stride, row_ptr, count_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``out[p] = q[row[p]]`` for ``p = program_id(0)`` below ``count[0]``; rows of ``WIDTH`` elements."""
    pair = tl.program_id(0)
    if pair < tl.load(count_ptr):
        at = tl.arange(0, BLOCK)
        row = tl.load(row_ptr + pair).to(tl.int64)
        value = tl.load(q_ptr + row * q_stride + at, mask=at < WIDTH)
        tl.store(out_ptr + pair.to(tl.int64) * WIDTH + at, value, mask=at < WIDTH)


@triton.jit
def merge_listed_kernel(
    list_ptr_ptr,
    list_part_ptr,
    part_out_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    Q_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Row ``program_id(0)``, heads from ``program_id(1) * BLOCK_H``: merge the states that the row's list names.

    LSE in and out is the base-2 logarithm, FlashInfer's convention. No state, or only empty ones: output 0, ``-inf``.
    """
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, D)
    has_head = head < Q_HEADS
    first = tl.load(list_ptr_ptr + row)
    parts = tl.load(list_ptr_ptr + row + 1) - first

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    den = tl.full([BLOCK_H], 0.0, tl.float32)
    acc = tl.full([BLOCK_H, D], 0.0, tl.float32)
    for j0 in range(0, parts, BLOCK_P):
        # Unrolled, so that all loads of a step are in flight together; first the maximum, then the weights.
        m_new = m
        for i in tl.static_range(BLOCK_P):
            live = j0 + i < parts
            part = tl.load(list_part_ptr + first + j0 + i, mask=live, other=0).to(tl.int64)
            lse = tl.load(part_lse_ptr + part * Q_HEADS + head, mask=has_head & live, other=float("-inf"))
            m_new = tl.maximum(m_new, lse)
        # -inf - -inf is NaN: shift an all-empty row by a finite number.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - base)
        den = den * alpha
        acc = acc * alpha[:, None]
        for i in tl.static_range(BLOCK_P):
            live = j0 + i < parts
            at = tl.load(list_part_ptr + first + j0 + i, mask=live, other=0).to(tl.int64) * Q_HEADS + head
            lse = tl.load(part_lse_ptr + at, mask=has_head & live, other=float("-inf"))
            some = lse > float("-inf")
            # What an empty state holds as output is anybody's guess: it is not read.
            value = tl.load(part_out_ptr + at[:, None] * D + dims[None, :], mask=some[:, None], other=0.0)
            weight = tl.exp2(lse - base)
            den += weight
            acc += weight[:, None] * value.to(tl.float32)
        m = m_new
    some = den > 0.0
    out = acc / tl.where(some, den, 1.0)[:, None]
    lse_out = tl.where(some, m + tl.log2(tl.where(some, den, 1.0)), float("-inf"))
    at = row.to(tl.int64) * Q_HEADS + head
    tl.store(out_ptr + at[:, None] * D + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=has_head[:, None])
    tl.store(lse_ptr + at, lse_out, mask=has_head)
