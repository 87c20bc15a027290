"""Tile sizes and launch shapes of grouped decode. Constants of a graph: they never depend on a step's plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class PrefixTile:
    """Tile and launch of one prefix grid.

    Attributes:
        block_m, block_n: query rows and slots of a tile.
        stages: software-pipelining depth.
        warps, max_registers: of a program; ``ctas_per_sm`` programs an SM make the persistent grid.
    """

    block_m: int
    block_n: int
    stages: int
    warps: int
    ctas_per_sm: int
    max_registers: int | None = None


@dataclass(frozen=True)
class TailTile:
    """Tile and launch of the tail grid.

    Attributes:
        block_n, stages, warps, max_registers: as in :class:`PrefixTile`.
        ctas_per_sm: programs an SM; more than fit, so that they start one by one as room appears.
        units_per_sm: (split, KV head) units an SM that the schedule aims at.
    """

    block_n: int
    stages: int
    warps: int
    ctas_per_sm: int
    units_per_sm: int = 4
    max_registers: int | None = None


@dataclass(frozen=True)
class KernelConfig:
    """One tuning point.

    Attributes:
        wide: grid for items with many query rows, bound by arithmetic. Its registers and shared memory leave room on
            each SM for a program of the tail grid, which is bound by memory: the two run side by side.
        narrow: grid for items with at most ``narrow_rows`` query rows a KV head, bound by memory: two programs an SM,
            for more loads in flight. It runs last by default; where it has no unit it costs a launch, and where
            ``narrow_rows`` is 0 it is left out.
        narrow_least: tokens times KV heads that such items must have together; with fewer the wide grid takes them,
            which starts at once and runs beside the tails.
        tail: the tail grid.
        merge_heads, merge_parts, merge_warps: heads of a merge program, partials a step, warps.
        tma: prefix tiles through the bulk tensor copy engine.
        pdl: programmatic dependent launch: each grid may start beside the one before it.
        unit_overhead: prologue and epilogue of a prefix unit, in tiles (host planning).
        part_overhead: one partial more in the merge of a row, in tiles: the merge reads a row's partials a few at a
            time, so where few KV heads would be cut into many chunks it is the longest part.
        equal_shares_items: up to so many items of one row tile are cut into one equal share a program, where that
            should end sooner than chunks of one common size; with more items chunks come out even as they are.
        tails_last: the tail grid behind the narrow one, not before it.
    """

    wide: PrefixTile = field(default_factory=lambda: PrefixTile(128, 64, 3, 8, 1, 192))
    narrow: PrefixTile = field(default_factory=lambda: PrefixTile(64, 64, 3, 4, 2))
    narrow_rows: int = 32
    narrow_least: int = 8 * 32768
    tail: TailTile = field(default_factory=lambda: TailTile(64, 5, 4, 8))
    merge_heads: int = 4
    merge_parts: int = 5
    merge_warps: int = 4
    tma: bool = True
    pdl: bool = True
    unit_overhead: float = 6.0
    part_overhead: float = 0.15
    equal_shares_items: int = 32
    tails_last: bool = False


def default_config(dtype: torch.dtype, head_dim: int) -> KernelConfig:
    """The shipped tuning point. Measured for 2-byte types and head size 128; larger elements or heads get less tile."""
    if dtype.itemsize > 2 or head_dim > 128:
        tile = PrefixTile(64, 32, 1, 4, 1)
        narrow = PrefixTile(16, 32, 1, 4, 1)
        return KernelConfig(tile, narrow, 16, 0, TailTile(32, 1, 4, 8), tma=False)
    return KernelConfig()


def small_config(dtype: torch.dtype, head_dim: int) -> KernelConfig | None:
    """For steps in which no item has more than 64 query rows: such items alone, without the narrow grid.

    Measured 2 to 6% faster there than the default, whose tile of 128 rows would be half empty, and 15% slower elsewhere
    (docs/log.md, tuning round 6). A grid's tile is fixed when a graph is captured, so it is an op and a graph of its
    own. None where the default's tile is no larger.
    """
    small = KernelConfig(wide=PrefixTile(64, 64, 4, 4, 1), narrow_rows=0)
    return small if default_config(dtype, head_dim).wide.block_m > small.wide.block_m else None
