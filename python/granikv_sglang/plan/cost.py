"""Time of one attention layer by regime: a roofline for each engine, its constants fitted to measurements.

Only whole-number sums, the four operations and square roots are used, in a fixed order: the same inputs give the same
bits on every rank. Times are microseconds, sizes bytes, rates per microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from granikv_sglang.core import Bound, Regime
from granikv_sglang.plan.features import Features, Shape
from granikv_sglang.plan.work import Kind, Machine, SharedWork, UniformWork, Work, is_plain, shared_work, uniform_work

# Looking up an enum's member costs as much as a few products.
_GEMM = Regime.BATCHED_GEMM
_MEMORY, _COMPUTE, _LAUNCH = Bound.MEMORY, Bound.COMPUTE, Bound.LAUNCH


@dataclass(frozen=True)
class UniformConstants:
    """The stock backend.

    Attributes:
        launch_us: fixed cost of a layer.
        row_us: of each request.
        hbm: bytes a microsecond of what is read once.
        again: bytes a microsecond of what another request has just read (on a GPU mostly out of L2).
        miss: 0 to 1, share of those reads that miss when very many groups are read at a time.
        token_us: arithmetic for one token of one KV head on one unit; it runs beside the loads.
        part_us: of each piece that one request's context is cut into.
        busy_us: more, where the pieces of all requests take most multiprocessors.
        wave_us: of each round of thread blocks behind the first.
        spread: 0 to 1, how much of the idle time at the end of uneven work is felt where loads bound it: the
            multiprocessors that still have work can take part of the others' bandwidth. Arithmetic feels all of it.
    """

    launch_us: float
    row_us: float
    hbm: float
    again: float
    miss: float
    token_us: float
    part_us: float
    busy_us: float
    wave_us: float
    spread: float


@dataclass(frozen=True)
class SharedConstants:
    """An engine that reads each shared stretch once.

    Attributes:
        launch_us: fixed cost of a layer, all its launches.
        item_us: of each shared stretch.
        hbm, again: as above, of the dense prefix; ``again`` for further query tiles of one stretch.
        rate: operations a microsecond of the matrix units, padding of tiles included.
        overhead: start and end of a unit's work, in tiles.
        tail: bytes a microsecond of private tokens; ``token_us`` as above, of private tokens.
        round_us: of each round of pieces of private tails that a multiprocessor takes.
        state: bytes a microsecond of partial results written and merged.
        part_us: of each partial result that one request's merge has to read in turn.
        overlap: 0 to 1, how much of the shorter of prefix and tail pass hides behind the longer.
    """

    launch_us: float
    item_us: float
    hbm: float
    again: float
    rate: float
    overhead: float
    tail: float
    token_us: float
    round_us: float
    state: float
    part_us: float
    overlap: float


FRACTIONS = frozenset({"miss", "spread", "overlap"})
"""Constants from 0 to 1; all others are positive."""


@dataclass(frozen=True)
class Link:
    """An all-reduce between tensor-parallel ranks: ``us`` at least, and ``rate`` bytes a microsecond."""

    us: float
    rate: float

    def us_of(self, size: int) -> float:
        """Microseconds of an all-reduce of ``size`` bytes."""
        return self.us + size / self.rate


@dataclass(frozen=True)
class Constants:
    """Everything the classifier needs of a device.

    Attributes:
        machine, uniform, cascade, gemm, link: see there.
        plain: the stock backend where fewer than four query heads share a KV head: FlashInfer then decodes without
            tensor cores.
        margin, plain_margin: a shared regime must be predicted to be at least this share faster than UNIFORM to be
            taken; the second where UNIFORM is ``plain``, whose times go in steps that no smooth model follows.
        regimes: shared regimes worth an engine and a graph here.
    """

    machine: Machine
    uniform: UniformConstants
    plain: UniformConstants
    cascade: SharedConstants
    gemm: SharedConstants
    link: Link
    margin: float
    plain_margin: float
    regimes: tuple[Regime, ...]

    def of(self, regime: Regime, shape: Shape) -> UniformConstants | SharedConstants:
        """Those of a regime's engine at these heads."""
        return self.stock(shape) if regime is Regime.UNIFORM else self.shared(regime)

    def stock(self, shape: Shape) -> UniformConstants:
        """Those of the stock backend's kernel at these heads."""
        return self.plain if is_plain(shape, self.machine) else self.uniform

    def margin_of(self, shape: Shape) -> float:
        """What a shared regime must be predicted to gain on UNIFORM at these heads."""
        return self.plain_margin if is_plain(shape, self.machine) else self.margin

    def shared(self, regime: Regime) -> SharedConstants:
        """Those of a shared regime's engine."""
        return self.gemm if regime is _GEMM else self.cascade


class Cost(NamedTuple):
    """Predicted microseconds of a layer, in three parts that need not add up (passes overlap), and what bounds it."""

    us: float
    memory_us: float
    compute_us: float
    fixed_us: float

    @property
    def bound(self) -> Bound:
        if self.memory_us >= self.compute_us:
            return _MEMORY if self.memory_us >= self.fixed_us else _LAUNCH
        return _COMPUTE if self.compute_us >= self.fixed_us else _LAUNCH


def uniform_cost(work: UniformWork, c: UniformConstants, machine: Machine) -> Cost:
    """Predicted time of the stock backend."""
    rows, prefix_bytes, read_bytes, tail_bytes, streams, prefix_heads, tail_heads, pieces, busy, idle, waves = work
    missed = c.miss * (1 - 1 / streams) if streams else 0.0
    cold = prefix_bytes + missed * (read_bytes - prefix_bytes)
    late = 1 + c.spread * idle
    unit = c.token_us / machine.units * (1 + idle)
    first, again, tail = cold / c.hbm * late, read_bytes / c.again * late, tail_bytes / c.hbm * late
    products, tail_products = prefix_heads * unit, tail_heads * unit
    if pieces >= 2:
        # Pieces of prefixes and of tails run side by side.
        memory, compute = _soft_max(first + tail, again), products + tail_products
        varying = _soft_max(memory, compute)
    else:
        # Thread blocks go through their requests in step: all are in a prefix, then all in a tail.
        read = _hard_max(first, again)
        memory, compute = read + tail, products + tail_products
        varying = _hard_max(read, products) + _hard_max(tail, tail_products)
    fixed = c.launch_us + rows * c.row_us + pieces * c.part_us + busy * c.busy_us + waves * c.wave_us
    return Cost(fixed + varying, memory, compute, fixed)


def shared_cost(work: SharedWork, c: SharedConstants, machine: Machine) -> Cost:
    """Predicted time of a shared regime."""
    (
        items, prefix_bytes, again_bytes, operations, tile_operations, tail_bytes, tail_heads, state_bytes,
        filled, partials, rounds,
    ) = work  # fmt: skip
    read = prefix_bytes / c.hbm + again_bytes / c.again
    compute = (operations / filled + c.overhead * tile_operations) / c.rate if items else 0.0
    prefix = _soft_max(read, compute)
    private = _soft_max(tail_bytes / c.tail, tail_heads * c.token_us / machine.units)
    tail = private + rounds * c.round_us
    fixed = c.launch_us + items * c.item_us + state_bytes / c.state + partials * c.part_us
    longer, shorter = (prefix, tail) if prefix >= tail else (tail, prefix)
    return Cost(fixed + longer + (1 - c.overlap) * shorter, read + private, compute, fixed)


def _soft_max(a: float, b: float) -> float:
    """The larger, and up to 19% more where both are near: loads and products never overlap perfectly."""
    a2, b2 = a * a, b * b
    return sqrt(sqrt(a2 * a2 + b2 * b2))


def _hard_max(a: float, b: float) -> float:
    """The larger, and up to 9% more where both are near: so well do FlashInfer's loads hide behind its products."""
    return sqrt(_soft_max(a * a, b * b))


def predict(f: Features, c: Constants, regimes: tuple[Regime, ...]) -> list[Cost]:
    """Predicted cost of one layer under UNIFORM, and then under each of ``regimes``."""
    machine = c.machine
    costs = [uniform_cost(uniform_work(f, machine), c.stock(f.shape), machine)]
    for regime in regimes:
        costs.append(shared_cost(shared_work(f, machine, regime), c.shared(regime), machine))
    return costs


def all_reduce_us(shape: Shape, rows: int, link: Link) -> float:
    """The all-reduce behind each attention layer: a cost of the layer that no regime changes."""
    if shape.tp == 1:
        return 0.0
    return link.us_of(rows * shape.row_bytes * shape.tp)


def cost_of(work: Work, constants: UniformConstants | SharedConstants, machine: Machine) -> Cost:
    """The cost of any work, for fitting."""
    if isinstance(work, UniformWork):
        assert isinstance(constants, UniformConstants)
        return uniform_cost(work, constants, machine)
    assert isinstance(constants, SharedConstants)
    return shared_cost(work, constants, machine)


def analytic(machine: Machine) -> Constants:
    """Constants for a device nobody has measured: data-sheet orders of magnitude, and the thresholds' experience."""
    if machine.kind is Kind.CPU:
        shared = SharedConstants(40, 60, 6e3, 12e3, 6e4, 0.5, 2.5e3, 0.002, 1, 4e3, 0.1, 0.05)
        uniform = UniformConstants(20, 100, 2.5e3, 3e3, 0.05, 0.002, 0.1, 1, 1, 0.05)
        both = (Regime.CASCADE, Regime.BATCHED_GEMM)
        return Constants(machine, uniform, uniform, shared, shared, Link(50, 1e3), 0.05, 0.05, both)
    scale = machine.units / 132
    hbm, again = 4.0e6 * scale, 9e6 * scale
    uniform = UniformConstants(9, 0.01, hbm, 1.0e7 * scale, 0.2, 7.1e-3, 0.04, 2, 2, 0.3)
    plain = UniformConstants(9, 0.01, hbm, 1.0e7 * scale, 0.2, 7.1e-3, 0.04, 2, 2, 0.3)
    gemm = SharedConstants(7, 0.02, hbm, again, 2.2e9 * scale, 4, hbm, 8e-3, 1, 8e6 * scale, 0.12, 0.5)
    cascade = SharedConstants(22, 0.05, hbm, again, 1.7e9 * scale, 6, 3e6 * scale, 8e-3, 1, 6e6 * scale, 0.1, 0.05)
    return Constants(machine, uniform, plain, cascade, gemm, Link(12, 2e5), 0.1, 0.1, (Regime.BATCHED_GEMM,))
