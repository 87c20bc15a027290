"""Prefix and tail units in one persistent launch, pulled from two work queues."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from granikv_kernels.grouped_prefix.kernel import UNIT_FIELDS, prefix_unit
from granikv_kernels.tail_attention.kernel import TAIL_FIELDS, tail_unit


@triton.jit(do_not_specialize=["rows", "first_tail_part", "tail_first_from", "req_stride"])
def fused_kernel(
    head_ptr,
    units_ptr,
    tail_ptr_ptr,
    splits_ptr,
    queue_ptr,
    q_ptr,
    q_stride,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    pair_row_ptr,
    pair_part_ptr,
    req_to_token_ptr,
    req_stride,
    part_out_ptr,
    part_lse_ptr,
    scale_log2,
    rows,
    first_tail_part,
    tail_first_from,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GQA: tl.constexpr,
    D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SMALL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SMALL_STAGES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TAIL_BLOCK_N: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    EVICT: tl.constexpr,
    LAZY: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs below ``tail_first_from`` start with prefix units, the others with tail units; each then helps with the rest.

    So the programs that share an SM are, at first, one bound by arithmetic and one bound by memory.
    """
    prefix_units = tl.load(head_ptr)
    tail_units = tl.load(tail_ptr_ptr + rows) * KV_HEADS
    tail_first = tl.program_id(0) >= tail_first_from
    for step in tl.range(0, 2, num_stages=1):
        if tail_first == (step == 0):
            u = tl.atomic_add(queue_ptr + 1, 1)
            while u < tail_units:
                split = u // KV_HEADS
                tail_unit(
                    splits_ptr + split * TAIL_FIELDS, u % KV_HEADS, first_tail_part + split,
                    q_ptr, q_stride, k_ptr, v_ptr, req_to_token_ptr, req_stride, part_out_ptr, part_lse_ptr, scale_log2,
                    Q_HEADS, GQA, D, SLOT_STRIDE, HEAD_STRIDE, BLOCK_G, TAIL_BLOCK_N, TAIL_STAGES, COMPUTE, PRECISION,
                    EVICT,
                )  # fmt: skip
                u = tl.atomic_add(queue_ptr + 1, 1)
        else:
            u = tl.atomic_add(queue_ptr, 1)
            while u < prefix_units:
                unit_ptr = units_ptr + u * UNIT_FIELDS
                small = tl.load(unit_ptr + 7)
                if small != 0:
                    prefix_unit(
                        unit_ptr, q_ptr, q_stride, k_ptr, v_ptr, k_desc, v_desc, pair_row_ptr, pair_part_ptr,
                        part_out_ptr, part_lse_ptr, scale_log2,
                        Q_HEADS, GQA, D, SLOT_STRIDE, HEAD_STRIDE, SMALL_M, BLOCK_N, SMALL_STAGES, COMPUTE, PRECISION, LAZY, TMA,
                    )  # fmt: skip
                else:
                    prefix_unit(
                        unit_ptr, q_ptr, q_stride, k_ptr, v_ptr, k_desc, v_desc, pair_row_ptr, pair_part_ptr,
                        part_out_ptr, part_lse_ptr, scale_log2,
                        Q_HEADS, GQA, D, SLOT_STRIDE, HEAD_STRIDE, BLOCK_M, BLOCK_N, STAGES, COMPUTE, PRECISION, LAZY, TMA,
                    )  # fmt: skip
                u = tl.atomic_add(queue_ptr, 1)
    if PDL:
        gdc_launch_dependents()
