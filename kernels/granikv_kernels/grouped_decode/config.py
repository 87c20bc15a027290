"""Tile sizes and launch shapes of grouped decode. Constants of a graph: they never depend on a step's plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KernelConfig:
    """One tuning point.

    Attributes:
        block_m, small_m: query rows of a prefix unit; items with at most ``small_m`` rows a KV head take the small tile.
        block_n: slots of one prefix tile.
        stages, small_stages: software-pipelining depth of the two prefix loops.
        warps, ctas_per_sm, max_registers: shape of the prefix launch; the grid is ``ctas_per_sm`` programs an SM.
        tail_block_n, tail_stages, tail_warps, tail_ctas_per_sm: the same for the tail launch.
        tail_units_per_sm: (split, KV head) units an SM that the tail schedule aims at.
        tail_flatten: let the compiler pipeline the tail's loads across units.
        tail_evict: cache policy of the tail's loads, which nothing reads twice.
        merge_parts, merge_warps: partials that one step of a merge program takes, and its warps.
        tma: prefix tiles through the bulk tensor copy engine.
        lazy: rescale the prefix accumulator only when a maximum has grown by 2^8.
        fused: prefix and tail units in one persistent launch.
        pdl: programmatic dependent launch: the tail pass starts beside the prefix pass, the merge is set up early.
        unit_overhead: prologue and epilogue of a prefix unit, in tiles of ``block_n`` slots (host planning).
        small_cost: time of a small tile over that of a large one (host planning).
    """

    block_m: int = 128
    small_m: int = 64
    block_n: int = 64
    stages: int = 2
    small_stages: int = 3
    warps: int = 4
    ctas_per_sm: int = 2
    max_registers: int | None = None
    tail_block_n: int = 64
    tail_stages: int = 3
    tail_warps: int = 4
    tail_ctas_per_sm: int = 2
    tail_units_per_sm: int = 4
    tail_flatten: bool = False
    tail_evict: str = ""
    merge_parts: int = 16
    merge_warps: int = 1
    tma: bool = False
    lazy: bool = False
    fused: bool = False
    pdl: bool = True
    unit_overhead: float = 3.0
    small_cost: float = 0.6


def default_config(dtype: torch.dtype, head_dim: int) -> KernelConfig:
    """The shipped tuning point, by element size: float32 tiles take twice the shared memory."""
    if dtype.itemsize > 2:
        return KernelConfig(
            block_m=64, small_m=16, block_n=32, stages=1, small_stages=1, tail_block_n=32, tail_stages=1, warps=4
        )
    return KernelConfig()
