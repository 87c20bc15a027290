"""Which passes are measured: one cell is a batch of equal groups on one head layout. Pure values."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from granikv_sglang.core import Reason, Regime
from granikv_sglang.plan import Decision, Features, Item, Plan, Shape, coverage_of

MAX_ROWS = 512
"""Requests of the largest cell."""
MAX_TOKENS = 1 << 18
"""Tokens of the largest cell's shared stretches, each counted once."""


@dataclass(frozen=True)
class Layout:
    """Heads of a layer on one rank, and bytes a value."""

    q_heads: int
    kv_heads: int
    head_dim: int
    element: int = 2

    @property
    def name(self) -> str:
        return f"{self.q_heads}/{self.kv_heads}x{self.head_dim}"

    @property
    def shape(self) -> Shape:
        return Shape(self.q_heads, self.kv_heads, self.head_dim, self.element)


LLAMA, QWEN, NARROW, SMALL = Layout(32, 8, 128), Layout(40, 8, 128), Layout(8, 1, 128), Layout(9, 3, 64)
GPU_LAYOUTS = (LLAMA, QWEN, NARROW, SMALL)
CPU_LAYOUTS = (Layout(9, 3, 64, 4), Layout(8, 1, 64, 4), Layout(32, 8, 128, 4))


@dataclass(frozen=True)
class Cell:
    """``groups`` prefixes with ``members`` requests each, ``tail`` private tokens a request.

    ``tokens`` is the length of every prefix, or with ``mixed`` of the longest: the others grow in equal steps up to it.
    One member means nothing is shared: the cell has no items.
    """

    layout: Layout
    groups: int
    members: int
    tokens: int
    tail: int
    mixed: bool = False

    @property
    def rows(self) -> int:
        return self.groups * self.members

    @property
    def lengths(self) -> list[int]:
        """Tokens of each group's prefix."""
        if not self.mixed:
            return [self.tokens] * self.groups
        return [self.tokens * (i + 1) // self.groups for i in range(self.groups)]

    @property
    def slots(self) -> int:
        """Slots that the cell's tokens take, each prefix once where it is shared."""
        return sum(self.lengths) + self.rows * self.tail

    @property
    def items(self) -> tuple[Item, ...]:
        """Shared stretches: extents one behind the other from slot 16 on, each at an unaligned start."""
        items, at = [], 16
        for i, tokens in enumerate(self.lengths):
            rows = tuple(range(i * self.members, (i + 1) * self.members))
            items.append(Item(at, tokens, rows, i + 1))
            at += tokens + 13
        return tuple(items)

    def plan(self, regime: Regime, version: int) -> Plan:
        """The plan of the pass; without items where nothing is shared."""
        items = self.items if self.members > 1 else ()
        return Plan(Decision(regime, Reason.FORCED), items, coverage_of(items, self.rows), version)

    def features(self) -> Features:
        """What the classifier sees of it."""
        items = self.items if self.members > 1 else ()
        total = sum(n * self.members for n in self.lengths) + self.rows * self.tail
        return Features.of(items, max(self.lengths) if items else 0, self.rows, self.layout.shape, total)

    def to_json(self) -> dict[str, Any]:
        heads = self.layout
        return {
            "q_heads": heads.q_heads, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim, "element": heads.element,
            "groups": self.groups, "members": self.members, "tokens": self.tokens, "tail": self.tail,
            "mixed": self.mixed,
        }  # fmt: skip

    @staticmethod
    def from_json(value: dict[str, Any]) -> Cell:
        """Raises KeyError where a field is missing."""
        layout = Layout(value["q_heads"], value["kv_heads"], value["head_dim"], value["element"])
        return Cell(layout, value["groups"], value["members"], value["tokens"], value["tail"], value["mixed"])


def layout_of(cell: Cell, slots: int, seed: int = 0) -> tuple[list[int], np.ndarray]:
    """Where a cell's tokens lie: first slot of each group's prefix, and int64 ``[rows, tail]`` slots of the tails.

    Tails are drawn at random from the ``slots`` behind the extents, as in a pool that has been used for a while.
    """
    last = cell.items[-1]
    first_free = last.start + last.tokens + 13
    wanted = cell.rows * cell.tail
    if first_free + wanted > slots:
        raise ValueError(f"{cell} needs {first_free + wanted} slots, there are {slots}")
    drawn = np.random.default_rng(seed).permutation(slots - first_free)[:wanted] + first_free
    return [item.start for item in cell.items], drawn.reshape(cell.rows, cell.tail)


def needed_slots(cell: Cell) -> int:
    """Slots of a pool that holds a cell with gaps and some room to scatter tails in."""
    return cell.slots + 16 + 13 * cell.groups + max(64, cell.rows * cell.tail // 8)


def fits(cell: Cell) -> bool:
    """Whether a cell is within what is measured."""
    return cell.rows <= MAX_ROWS and sum(cell.lengths) <= MAX_TOKENS


K = 1024
LENGTHS = (512, K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K)
MEMBERS = (1, 2, 4, 8, 16, 32, 64, 128)


def regret_grid() -> list[Cell]:
    """The cells of the classifier's examination on a GPU: members 1 to 128, 512 to 32K tokens, 1 to 16 groups."""
    cells = [Cell(LLAMA, 1, m, n, 256) for m in MEMBERS for n in LENGTHS]
    for layout in (QWEN, NARROW, SMALL):
        cells += [Cell(layout, 1, m, n, 256) for m in (2, 8, 32, 128) for n in (512, 2 * K, 8 * K, 32 * K)]
        cells += [Cell(layout, 1, m, n, 256) for m in (4, 16, 64) for n in (K, 4 * K, 16 * K)]
    for layout in GPU_LAYOUTS:
        cells += [Cell(layout, g, m, n, 256) for g in (2, 4, 16) for m in (2, 8, 32) for n in (K, 4 * K, 16 * K)]
        cells += [Cell(layout, g, 8, 16 * K, 256, mixed=True) for g in (4, 8)]
        cells += [Cell(layout, 1, m, n, t) for t in (64, K, 4 * K) for m in (4, 32) for n in (K, 8 * K)]
    return _spread([c for c in dict.fromkeys(cells) if fits(c)], 1)


def calibration_grid() -> list[Cell]:
    """The points of a calibration on a GPU; every fourth is kept from the fit. None is a cell of the examination."""
    cells = []
    for layout in GPU_LAYOUTS:
        cells += [Cell(layout, 1, m, n, 192) for m in (2, 6, 24, 48, 100) for n in (768, 3000, 6000, 24000)]
        # Where regimes are nearest to each other: few members, short prefixes.
        cells += [Cell(layout, 1, m, n, 224) for m in (2, 3, 5, 9, 14) for n in (600, 1200, 2500, 5000)]
        cells += [Cell(layout, 2, m, n, 160) for m in (2, 4) for n in (700, 2200)]
        cells += [Cell(layout, 3, m, n, 320) for m in (3, 12, 40) for n in (1500, 10000)]
        cells += [Cell(layout, 12, m, n, 192) for m in (2, 5, 20) for n in (800, 5000)]
        cells += [Cell(layout, 6, 10, 12000, 192, mixed=True), Cell(layout, 1, 10, 3000, 96)]
        cells += [Cell(layout, 1, m, n, t) for t, m, n in ((2048, 6, 3000), (2048, 48, 768), (640, 24, 12000))]
        cells += [Cell(layout, 1, m, n, t) for t, m, n in ((5000, 3, 6000), (3500, 5, 10000), (3000, 20, 1500))]
        cells += [Cell(layout, 40, 1, 1000, 256), Cell(layout, 3, 1, 6000, 96)]
    return _spread([c for c in cells if fits(c)], 2)


def cpu_grid() -> list[Cell]:
    """The same for a CPU, whose caches and cores are smaller."""
    cells = []
    for layout in CPU_LAYOUTS:
        cells += [Cell(layout, 1, m, n, 48) for m in (2, 4, 12) for n in (64, 256, 1000)]
        cells += [Cell(layout, g, m, n, 48) for g in (2, 6) for m in (2, 5) for n in (96, 500)]
        cells += [Cell(layout, 1, 5, 200, 400), Cell(layout, 4, 4, 600, 48, mixed=True), Cell(layout, 8, 1, 100, 64)]
    return _spread([c for c in cells if c.rows * (c.tokens + c.tail) * c.layout.kv_heads <= 1 << 18], 3)


def _spread(cells: Sequence[Cell], seed: int) -> list[Cell]:
    """In an order of which every beginning covers the whole: a run that is cut short is still of use.

    The layouts take turns, so that each has its share.
    """
    by_layout: dict[Layout, list[Cell]] = {}
    for cell in cells:
        by_layout.setdefault(cell.layout, []).append(cell)
    for own in by_layout.values():
        random.Random(seed).shuffle(own)
    return list(_in_turn(list(by_layout.values())))


def _in_turn(lists: list[list[Cell]]) -> Iterator[Cell]:
    for i in range(max(map(len, lists))):
        yield from (own[i] for own in lists if i < len(own))


def split(cells: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Those to fit on and those to check on: every fourth of each layout."""
    seen: dict[Layout, int] = {}
    fit_on: list[Cell] = []
    check_on: list[Cell] = []
    for cell in cells:
        seen[cell.layout] = seen.get(cell.layout, 0) + 1
        (check_on if seen[cell.layout] % 4 == 0 else fit_on).append(cell)
    return fit_on, check_on
