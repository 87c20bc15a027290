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
    queue_ptr,
    first_tail_part,
    Q_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row ``program_id(0)``, head ``program_id(1)``: merge its prefix partials and its tail partials.

    Prefix partials are the run ``part_ptr[row] .. part_ptr[row + 1]``, tail partials the run ``first_tail_part +
    tail_ptr[row] .. tail_ptr[row + 1]``. No partial at all: output 0, ``lse = -inf``.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, D)
    # The lists were written before the layer began; only the partials come from the passes before.
    first = tl.load(part_ptr_ptr + row)
    prefix_parts = tl.load(part_ptr_ptr + row + 1) - first
    tail = tl.load(tail_ptr_ptr + row)
    parts = prefix_parts + tl.load(tail_ptr_ptr + row + 1) - tail
    tail_at = first_tail_part + tail - prefix_parts
    if PDL:
        gdc_wait()
    if (row == 0) & (head == 0):
        # Work queues of the fused pass: empty again for the next layer.
        tl.store(queue_ptr, 0)
        tl.store(queue_ptr + 1, 0)

    m = -float("inf")
    den = 0.0
    acc = tl.full([D], 0.0, tl.float32)
    for j0 in range(0, parts, BLOCK_P):
        j = j0 + tl.arange(0, BLOCK_P)
        live = j < parts
        at = tl.where(j < prefix_parts, first + j, tail_at + j).to(tl.int64) * Q_HEADS + head
        lse = tl.load(part_lse_ptr + at, mask=live, other=float("-inf"))
        value = tl.load(part_out_ptr + at[:, None] * D + dims[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        m_new = tl.maximum(m, tl.max(lse, 0))
        # exp(-inf - -inf) is NaN: shift an all-empty row by a finite number.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2((lse - base) * 1.4426950408889634)
        alpha = tl.exp2((m - base) * 1.4426950408889634)
        den = den * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(weight[:, None] * value, 0)
        m = m_new
    some = den > 0.0
    out = acc / tl.where(some, den, 1.0)
    lse_out = tl.where(some, m + tl.log2(tl.where(some, den, 1.0)) * 0.6931471805599453, float("-inf"))
    out_at = row.to(tl.int64) * out_stride + head * D
    tl.store(out_ptr + out_at + dims, out.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + row * Q_HEADS + head, lse_out)
