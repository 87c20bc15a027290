"""Triton kernels of the tail pass: each request's private tokens, read slot by slot through SGLang's ``req_to_token``.

``schedule_kernel`` runs once a step: it turns sequence lengths and coverage, both on the device, into a work list, so
that no host work depends on a length. ``tail_kernel`` runs once a layer over that list.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from granikv_kernels.grouped_prefix.kernel import wait_in_last_program

TAIL_FIELDS = tl.constexpr(4)
"""int32 fields of one split: batch row, row of ``req_to_token``, first position, end position."""


@triton.jit(do_not_specialize=["rows", "target"])
def schedule_kernel(
    seq_lens_ptr,
    req_index_ptr,
    coverage_ptr,
    tail_ptr_ptr,
    splits_ptr,
    rows,
    target,
    part_tiles,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Cut every tail into splits of at most one common size, chosen so that there are about ``target`` of them.

    Fewer where the merge of the longest tail would cost more than they save: one partial of it takes ``part_tiles``
    tiles, and with s splits of n tiles n / s + part_tiles * s is least at n / s = sqrt(part_tiles * n).

    Writes ``tail_ptr [rows + 1]`` (first split of each row) and ``splits [.., 4]``. At most ``rows + target`` splits:
    each row adds at most one more than its share of full ones. One program.
    """
    row = tl.arange(0, ROWS)
    live = row < rows
    end = tl.load(seq_lens_ptr + row, mask=live, other=0).to(tl.int32)
    req = tl.load(req_index_ptr + row, mask=live, other=0).to(tl.int32)
    begin = tl.load(coverage_ptr + row, mask=live, other=0)
    length = tl.maximum(end - begin, 0)
    share = (tl.sum(length, 0) + target - 1) // target
    longest = (tl.max(length, 0) + ALIGN - 1) // ALIGN
    least = tl.ceil(tl.sqrt(longest.to(tl.float32) * part_tiles)).to(tl.int32)
    limit = tl.maximum(tl.maximum((share + ALIGN - 1) // ALIGN, least), 1) * ALIGN
    count = (length + limit - 1) // limit
    # Even splits, rounded up to whole tiles: never more than `limit`, so the last one is never empty.
    size = (length + tl.maximum(count, 1) - 1) // tl.maximum(count, 1)
    size = (size + ALIGN - 1) // ALIGN * ALIGN
    upto = tl.cumsum(count, 0)
    first = upto - count
    tl.store(tail_ptr_ptr + row, first, mask=live)
    tl.store(tail_ptr_ptr + row + 1, upto, mask=live)
    for s in range(0, tl.max(count, 0)):
        at = splits_ptr + (first + s) * TAIL_FIELDS
        has = live & (s < count)
        tl.store(at, row, mask=has)
        tl.store(at + 1, req, mask=has)
        tl.store(at + 2, begin + s * size, mask=has)
        tl.store(at + 3, tl.minimum(begin + (s + 1) * size, end), mask=has)


@triton.jit
def tail_unit(
    split_ptr,
    kv_head,
    part,
    q_ptr,
    q_stride,
    k_ptr,
    v_ptr,
    req_to_token_ptr,
    req_stride,
    part_out_ptr,
    part_lse_ptr,
    scale_log2,
    Q_HEADS: tl.constexpr,
    GQA: tl.constexpr,
    D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row's GQA group against one split of its tail. ``BLOCK_G >= GQA`` pads the group to a tensor-core tile."""
    row = tl.load(split_ptr)
    req = tl.load(split_ptr + 1)
    begin = tl.load(split_ptr + 2)
    end = tl.load(split_ptr + 3)
    group = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, D)
    cols = tl.arange(0, BLOCK_N)
    in_group = group < GQA
    head = kv_head * GQA + group
    q_off = row.to(tl.int64) * q_stride + head * D
    q = tl.load(q_ptr + q_off[:, None] + dims[None, :], mask=in_group[:, None], other=0.0).to(COMPUTE)
    slots_ptr = req_to_token_ptr + req.to(tl.int64) * req_stride
    k_head = k_ptr + kv_head * HEAD_STRIDE
    v_head = v_ptr + kv_head * HEAD_STRIDE

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    den = tl.full([BLOCK_G], 0.0, tl.float32)
    acc = tl.full([BLOCK_G, D], 0.0, tl.float32)
    for at in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        live = at + cols < end
        slot = tl.load(slots_ptr + at + cols, mask=live, other=0).to(tl.int64)
        off = slot[:, None] * SLOT_STRIDE + dims[None, :]
        k = tl.load(k_head + off, mask=live[:, None], other=0.0).to(COMPUTE)
        v = tl.load(v_head + off, mask=live[:, None], other=0.0).to(COMPUTE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = tl.where(live[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        den = den * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(COMPUTE), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new

    out = acc / den[:, None]
    lse = (m + tl.log2(den)) * 0.6931471805599453
    at_part = part.to(tl.int64) * Q_HEADS + head
    tl.store(part_lse_ptr + at_part, lse, mask=in_group)
    tl.store(
        part_out_ptr + at_part[:, None] * D + dims[None, :],
        out.to(part_out_ptr.dtype.element_ty),
        mask=in_group[:, None],
    )


@triton.jit(do_not_specialize=["rows", "first_part", "programs", "req_stride"])
def tail_kernel(
    tail_ptr_ptr,
    splits_ptr,
    q_ptr,
    q_stride,
    k_ptr,
    v_ptr,
    req_to_token_ptr,
    req_stride,
    part_out_ptr,
    part_lse_ptr,
    scale_log2,
    rows,
    first_part,
    programs,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GQA: tl.constexpr,
    D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Persistent grid over (split, kv head). Neighbouring programs take the heads of one split: the same DRAM pages."""
    units = tl.load(tail_ptr_ptr + rows) * KV_HEADS
    if PDL:
        # What follows may take the room that this grid leaves.
        gdc_launch_dependents()
    for u in tl.range(tl.program_id(0), units, programs, num_stages=1):
        split = u // KV_HEADS
        tail_unit(
            splits_ptr + split * TAIL_FIELDS, u % KV_HEADS, first_part + split,
            q_ptr, q_stride, k_ptr, v_ptr, req_to_token_ptr, req_stride, part_out_ptr, part_lse_ptr, scale_log2,
            Q_HEADS, GQA, D, SLOT_STRIDE, HEAD_STRIDE, BLOCK_G, BLOCK_N, STAGES, COMPUTE, PRECISION,
        )  # fmt: skip
    if PDL:
        wait_in_last_program()
