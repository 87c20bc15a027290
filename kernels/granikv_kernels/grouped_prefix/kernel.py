"""Triton kernel of grouped prefix attention: units of a work list, each one (item, chunk, kv head, tile of query rows).

A unit streams its chunk of K and V once, as a dense view, past up to ``BLOCK_M`` query rows: the members of the item
times the query heads of one KV head. Online softmax in base 2 (FlashAttention, Dao 2022), split over chunks
(FlashDecoding).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

UNIT_FIELDS = tl.constexpr(8)
"""int32 fields of one unit: first slot, slots, first pair, first row, end row, kv head, split, unused."""


@triton.jit
def wait_in_last_program():
    """Keep this grid from ending before the grid ahead of it in a programmatic dependent launch.

    Whoever waits for this grid waits for both then. One program is enough, the last to start: the others make room, for
    their like to run beside the grid ahead.
    """
    if tl.program_id(0) == tl.num_programs(0) - 1:
        gdc_wait()


@triton.jit
def softmax_step(
    q,
    k,
    v,
    live,
    m,
    den,
    acc,
    scale_log2,
    MASKED: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of online softmax: ``q [M, D]`` against ``k [N, D]`` and ``v [N, D]``; ``live [N]`` where MASKED."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        s = tl.where(live[None, :], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    den = den * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(COMPUTE), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, den, acc


@triton.jit
def prefix_unit(
    unit_ptr,
    q_ptr,
    q_stride,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    pair_row_ptr,
    pair_part_ptr,
    part_out_ptr,
    part_lse_ptr,
    scale_log2,
    Q_HEADS: tl.constexpr,
    GQA: tl.constexpr,
    D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Attention of one unit's rows over its chunk; writes normalised partial outputs and their natural-log LSE."""
    first_slot = tl.load(unit_ptr)
    slots = tl.load(unit_ptr + 1)
    first_pair = tl.load(unit_ptr + 2)
    first_row = tl.load(unit_ptr + 3)
    end_row = tl.load(unit_ptr + 4)
    kv_head = tl.load(unit_ptr + 5)
    split = tl.load(unit_ptr + 6)

    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D)
    cols = tl.arange(0, BLOCK_N)
    row_live = rows < end_row
    member = rows // GQA
    head = kv_head * GQA + rows % GQA
    batch_row = tl.load(pair_row_ptr + first_pair + member, mask=row_live, other=0)
    q_off = batch_row.to(tl.int64) * q_stride + head * D
    q = tl.load(q_ptr + q_off[:, None] + dims[None, :], mask=row_live[:, None], other=0.0).to(COMPUTE)

    # 64 bits once, for the chunk's origin; offsets within a chunk (slots times stride) fit 32.
    origin = first_slot.to(tl.int64) * SLOT_STRIDE + kv_head * HEAD_STRIDE
    k_chunk = k_ptr + origin
    v_chunk = v_ptr + origin
    tile = cols[:, None] * SLOT_STRIDE + dims[None, :]

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    den = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, D], 0.0, tl.float32)
    whole = slots // BLOCK_N
    for i in tl.range(0, whole, num_stages=STAGES):
        if TMA:
            k = k_desc.load([first_slot + i * BLOCK_N, kv_head * D]).to(COMPUTE)
            v = v_desc.load([first_slot + i * BLOCK_N, kv_head * D]).to(COMPUTE)
        else:
            at = i * (BLOCK_N * SLOT_STRIDE)
            k = tl.load(k_chunk + at + tile).to(COMPUTE)
            v = tl.load(v_chunk + at + tile).to(COMPUTE)
        m, den, acc = softmax_step(q, k, v, row_live, m, den, acc, scale_log2, False, COMPUTE, PRECISION)
    # At most one tile more. A loop, so that its loads too go straight to shared memory and hold no registers.
    # The slots behind an extent belong to somebody else and may hold anything, NaN included: read none of them.
    for i in tl.range(whole, (slots + BLOCK_N - 1) // BLOCK_N, num_stages=STAGES):
        at = i * (BLOCK_N * SLOT_STRIDE)
        live = i * BLOCK_N + cols < slots
        k = tl.load(k_chunk + at + tile, mask=live[:, None], other=0.0).to(COMPUTE)
        v = tl.load(v_chunk + at + tile, mask=live[:, None], other=0.0).to(COMPUTE)
        m, den, acc = softmax_step(q, k, v, live, m, den, acc, scale_log2, True, COMPUTE, PRECISION)

    out = acc / den[:, None]
    lse = (m + tl.log2(den)) * 0.6931471805599453
    first_part = tl.load(pair_part_ptr + first_pair + member, mask=row_live, other=0)
    part = (first_part + split).to(tl.int64) * Q_HEADS + head
    tl.store(part_lse_ptr + part, lse, mask=row_live)
    tl.store(
        part_out_ptr + part[:, None] * D + dims[None, :],
        out.to(part_out_ptr.dtype.element_ty),
        mask=row_live[:, None],
    )


@triton.jit(do_not_specialize=["which", "programs"])
def prefix_kernel(
    head_ptr,
    units_ptr,
    q_ptr,
    q_stride,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    pair_row_ptr,
    pair_part_ptr,
    part_out_ptr,
    part_lse_ptr,
    scale_log2,
    which,
    programs,
    Q_HEADS: tl.constexpr,
    GQA: tl.constexpr,
    D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Persistent grid over one class of units: ``head[which] .. head[which + 1]`` of the list, read on the device.

    ``FIRST``: nothing of this layer ran before. Otherwise, with PDL, the grid before may still be running.
    """
    if PDL:
        # What follows in the layer needs nothing from here: let it start in whatever room this grid leaves.
        gdc_launch_dependents()
    first = tl.load(head_ptr + which)
    end = tl.load(head_ptr + which + 1)
    for u in tl.range(first + tl.program_id(0), end, programs, num_stages=1):
        prefix_unit(
            units_ptr + u * UNIT_FIELDS, q_ptr, q_stride, k_ptr, v_ptr, k_desc, v_desc, pair_row_ptr, pair_part_ptr,
            part_out_ptr, part_lse_ptr, scale_log2,
            Q_HEADS, GQA, D, SLOT_STRIDE, HEAD_STRIDE, BLOCK_M, BLOCK_N, STAGES, COMPUTE, PRECISION, TMA,
        )  # fmt: skip
    if PDL and not FIRST:
        wait_in_last_program()
