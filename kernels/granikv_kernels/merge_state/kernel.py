"""Triton kernel that merges every partial of a row, prefix and tail, by log-sum-exp, in one launch."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit(do_not_specialize=["first_tail_part"])
def merge_kernel(
    part_ptr_ptr,
    tail_ptr_ptr,
    part_out_ptr,
    part_lse_ptr,
    out_ptr,
    out_stride,
    lse_ptr,
    first_tail_part,
    Q_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row ``program_id(0)``, heads from ``program_id(1) * BLOCK_H``: merge its prefix partials and its tail partials.

    Prefix partials are the run ``part_ptr[row] .. part_ptr[row + 1]``, tail partials the run ``first_tail_part +
    tail_ptr[row] .. tail_ptr[row + 1]``. No partial at all: output 0, ``lse = -inf``.
    """
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, D)
    has_head = head < Q_HEADS
    # The lists were written before the layer began; only the partials come from the passes before.
    first = tl.load(part_ptr_ptr + row)
    prefix_parts = tl.load(part_ptr_ptr + row + 1) - first
    tail = tl.load(tail_ptr_ptr + row)
    parts = prefix_parts + tl.load(tail_ptr_ptr + row + 1) - tail
    tail_at = first_tail_part + tail - prefix_parts
    if PDL:
        gdc_wait()

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    den = tl.full([BLOCK_H], 0.0, tl.float32)
    acc = tl.full([BLOCK_H, D], 0.0, tl.float32)
    for j0 in range(0, parts, BLOCK_P):
        # Unrolled, so that all loads of a step are in flight together; first the maximum, then the weights.
        m_new = m
        for i in tl.static_range(BLOCK_P):
            j = j0 + i
            part = tl.where(j < prefix_parts, first + j, tail_at + j).to(tl.int64)
            lse = tl.load(part_lse_ptr + part * Q_HEADS + head, mask=has_head & (j < parts), other=float("-inf"))
            m_new = tl.maximum(m_new, lse)
        # exp(-inf - -inf) is NaN: shift an all-empty row by a finite number.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2((m - base) * 1.4426950408889634)
        den = den * alpha
        acc = acc * alpha[:, None]
        for i in tl.static_range(BLOCK_P):
            j = j0 + i
            part = tl.where(j < prefix_parts, first + j, tail_at + j).to(tl.int64)
            at = part * Q_HEADS + head
            live = has_head & (j < parts)
            lse = tl.load(part_lse_ptr + at, mask=live, other=float("-inf"))
            value = tl.load(part_out_ptr + at[:, None] * D + dims[None, :], mask=live[:, None], other=0.0)
            weight = tl.exp2((lse - base) * 1.4426950408889634)
            den += weight
            acc += weight[:, None] * value.to(tl.float32)
        m = m_new
    some = den > 0.0
    out = acc / tl.where(some, den, 1.0)[:, None]
    lse_out = tl.where(some, m + tl.log2(tl.where(some, den, 1.0)) * 0.6931471805599453, float("-inf"))
    out_at = row.to(tl.int64) * out_stride + head * D
    tl.store(out_ptr + out_at[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=has_head[:, None])
    tl.store(lse_ptr + row * Q_HEADS + head, lse_out, mask=has_head)
