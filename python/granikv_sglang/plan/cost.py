"""Time of one attention layer by regime: a roofline for each engine, its constants fitted to measurements.

Only whole-number sums, the four operations and square roots are used, in a fixed order: the same inputs give the same
bits on every rank. Times are microseconds, sizes bytes, rates per microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import sqrt
from typing import NamedTuple

from granikv_sglang.core import Bound, Regime
from granikv_sglang.plan.features import Features, Shape, Tiles


class Kind(StrEnum):
    """Which engines compute the regimes; their tiles are facts of the code, not constants to fit."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True)
class Machine:
    """What is known of a device without measuring. ``units`` is multiprocessors of a GPU, 1 for a CPU."""

    kind: Kind
    units: int


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
        balance: 0 to 1, how much of the idle time at the end of uneven arithmetic is felt.
    """

    launch_us: float
    row_us: float
    hbm: float
    again: float
    miss: float
    token_us: float
    part_us: float
    busy_us: float
    balance: float


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


FRACTIONS = frozenset({"miss", "balance", "overlap"})
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
        margin: a shared regime must be predicted to be at least this share faster than UNIFORM to be taken.
        regimes: shared regimes worth an engine and a graph here.
    """

    machine: Machine
    uniform: UniformConstants
    plain: UniformConstants
    cascade: SharedConstants
    gemm: SharedConstants
    link: Link
    margin: float
    regimes: tuple[Regime, ...]

    def of(self, regime: Regime, shape: Shape) -> UniformConstants | SharedConstants:
        """Those of a regime's engine at these heads."""
        if regime is Regime.UNIFORM:
            return self.plain if is_plain(shape, self.machine) else self.uniform
        return self.gemm if regime is _GEMM else self.cascade


class Cost(NamedTuple):
    """Predicted microseconds of a layer, in three parts that need not add up (passes overlap), and what bounds it."""

    us: float
    memory_us: float
    compute_us: float
    fixed_us: float

    @property
    def bound(self) -> Bound:
        most = max(self.memory_us, self.compute_us, self.fixed_us)
        if most == self.memory_us:
            return Bound.MEMORY
        return Bound.COMPUTE if most == self.compute_us else Bound.LAUNCH


class UniformWork(NamedTuple):
    """What UNIFORM does, in whole numbers; ``idle`` is the span of uneven work over that of even work, less one."""

    rows: int
    first_bytes: int
    again_bytes: int
    streams: int
    token_heads: int
    pieces: float
    busy: float
    idle: float


class SharedWork(NamedTuple):
    """What a shared regime does.

    ``filled`` is the share of the multiprocessors that the prefix keeps busy, ``partials`` how many results a request's
    merge reads in turn, ``rounds`` how many pieces of private tails a multiprocessor takes.
    """

    items: int
    prefix_bytes: int
    again_bytes: int
    operations: int
    tile_operations: int
    tail_bytes: int
    tail_token_heads: int
    state_bytes: int
    filled: float
    partials: float
    rounds: float


Work = UniformWork | SharedWork

_GEMM, _CPU = Regime.BATCHED_GEMM, Kind.CPU  # looking up an enum's member costs as much as a few products
SOFTMAX = 1024
"""What a score's softmax takes on a GPU, in operations of its products: a tile of head size 64 is hardly quicker than
one of 128."""
BLOCK = 64
"""Slots of a tile of both CUDA engines."""
SMALL_ROWS = 64
"""Up to so many query rows in every item the Triton engine takes its small variant, whose tile is that high."""
PLAIN_GQA = 4
"""With fewer query heads to a KV head SGLang has FlashInfer decode without tensor cores."""
PIECE = 128
"""Tokens that it leaves in a piece at least."""
UNIT_TILES, PART_TILES = 6.0, 0.15
"""What the Triton engine's planner takes a unit's start and one more partial result of a request for, in tiles."""
TAIL_UNITS = 4
"""(Piece of a tail, KV head) pairs for each multiprocessor that it aims at."""
NARROW_ROWS, NARROW_LEAST = 32, 8 * 32768
"""When its other variant takes the narrow grid: query rows of an item, tokens times KV heads of such items together."""


def is_plain(shape: Shape, machine: Machine) -> bool:
    """Whether the stock backend decodes without tensor cores."""
    return shape.gqa < PLAIN_GQA and machine.kind is not _CPU


def uniform_work(f: Features, machine: Machine) -> UniformWork:
    """Work of the stock backend."""
    shape = f.shape
    total = f.reads + f.cold
    blocks, places = f.rows * shape.kv_heads, 2 * machine.units
    longest = f.longest + f.cold // max(1, f.rows)
    idle = _idle(blocks, total, longest, f.rows, places)
    pieces = min(longest / PIECE, places / blocks) if 0 < blocks <= places and machine.kind is not _CPU else 0.0
    # Where they are few, all else being equal, a layer takes 2 us less on an H200, and the step is as steep as this.
    busy = (max(1.0, pieces) * blocks / machine.units - 0.55) / 0.2
    return UniformWork(
        rows=f.rows,
        first_bytes=(f.unique + f.cold) * shape.token_bytes,
        again_bytes=(f.reads - f.unique) * shape.token_bytes,
        streams=int(f.tokens.size),
        token_heads=total * shape.kv_heads,
        pieces=pieces,
        busy=max(0.0, min(1.0, busy)) if machine.kind is not _CPU else 0.0,
        idle=idle if machine.kind is not _CPU else 0.0,
    )


def _idle(blocks: int, total: int, longest: int, rows: int, places: int) -> float:
    """FlashInfer's decode: ``blocks`` (request, KV head) pairs over ``places``; few are split, many run in waves."""
    if blocks == 0 or total == 0:
        return 0.0
    even = total * blocks / (rows * places)  # tokens a place would have to read
    if blocks <= places:
        if 10 * total >= 9 * rows * longest:  # all about equally long
            span = longest / (places // blocks)
        else:
            span = total / (places * rows / blocks - rows / 2)
        return max(0.0, min(span, float(longest)) / even - 1)
    waves = -(-blocks // places)
    return max(0.0, min(float(waves * longest), even + longest / 2) / even - 1)


def tiles_of(f: Features, kind: Kind, height: int) -> Tiles:
    """The tiles of one KV head. A CPU's engine pads nothing and stacks the query rows of a stretch."""
    if kind is _CPU:
        return Tiles(1, f.reads * f.shape.gqa, f.unique)
    found = f.tiles.get(height)
    if found is None:
        found = f.tiles[height] = _count_tiles(f, height)
    return found


def _count_tiles(f: Features, height: int) -> Tiles:
    # Shifts, since numpy divides whole numbers four times as slowly.
    blocks = (f.tokens + (BLOCK - 1)) >> 6
    if f.most * f.shape.gqa <= height:
        return Tiles(height, int(blocks.sum()) * height * BLOCK, f.unique)
    passes = (f.members * f.shape.gqa + (height - 1)) >> (height.bit_length() - 1)
    return Tiles(height, int(blocks.dot(passes)) * height * BLOCK, int(f.tokens.dot(passes)))


def _narrow(f: Features, wide: Tiles) -> Tiles:
    """``wide`` with the items that the Triton engine gives to its narrow grid at half the height."""
    which = f.members * f.shape.gqa <= NARROW_ROWS
    if int(f.tokens.dot(which)) * f.shape.kv_heads < NARROW_LEAST:
        return wide
    blocks = int(((f.tokens + (BLOCK - 1)) >> 6).dot(which))
    return Tiles(wide.height, wide.area - blocks * 64 * BLOCK, wide.covered)


def shared_work(f: Features, machine: Machine, regime: Regime) -> SharedWork:
    """Work of the engine behind a shared regime."""
    shape = f.shape
    small = f.most * shape.gqa <= SMALL_ROWS
    height = (SMALL_ROWS if small else 128) if regime is _GEMM else _cascade_tile(f.rows * shape.gqa)
    tiles = tiles_of(f, machine.kind, height)
    width = BLOCK
    if machine.kind is _CPU:
        width = 1
    elif regime is _GEMM and not small and f.least * shape.gqa <= NARROW_ROWS:
        tiles = _narrow(f, tiles)
    per_row = 4 * shape.head_dim + (0 if machine.kind is _CPU else SOFTMAX)
    token_bytes, kv_heads = shape.token_bytes, shape.kv_heads
    filled, partials, rounds = 1.0, 0.0, 0.0
    if regime is _GEMM and machine.kind is not _CPU and f.tokens.size:
        filled, partials = _pieces(f, tiles, machine)
        pieces = _tail_pieces(f, machine)
        partials += pieces
        rounds = f.rows * pieces * kv_heads / machine.units
    return SharedWork(
        f.tokens.size,
        f.unique * token_bytes,
        (tiles.covered - f.unique) * token_bytes,
        tiles.area * per_row * kv_heads,
        tiles.height * width * per_row * machine.units,
        f.cold * token_bytes,
        f.cold * kv_heads,
        (f.pairs + f.rows) * shape.row_bytes,
        filled,
        partials,
        rounds,
    )


def _pieces(f: Features, tiles: Tiles, machine: Machine) -> tuple[float, float]:
    """How full the Triton engine's planner makes the multiprocessors, and in how many pieces a request's prefix lies.

    It cuts a KV head's tiles into as many pieces as there is room for, or fewer: where the merge would take longer.
    """
    room = machine.units / f.shape.kv_heads
    count = tiles.area / (tiles.height * BLOCK)
    longest = (f.longest + (BLOCK - 1)) // BLOCK
    pieces = max(1.0, min(room, count / sqrt(PART_TILES * longest)))
    each = min(float(longest), max(1.0, pieces * longest / count))
    return min(1.0, pieces / room), each


def _tail_pieces(f: Features, machine: Machine) -> int:
    """In how many pieces it cuts one request's private tokens, where all have about as many."""
    most = -(-f.cold // max(1, TAIL_UNITS * machine.units // f.shape.kv_heads))
    return -(-(f.cold // f.rows) // (-(-most // BLOCK) * BLOCK))


def _cascade_tile(query_rows: int) -> int:
    """Query rows of FlashInfer's tile: the cascade engine plans so that small batches get a small one."""
    return 16 if query_rows <= 16 else 64 if query_rows <= 64 else 128


def uniform_cost(work: UniformWork, c: UniformConstants, machine: Machine) -> Cost:
    """Predicted time of the stock backend."""
    missed = c.miss * (1 - 1 / work.streams) if work.streams else 0.0
    memory = work.first_bytes / c.hbm + work.again_bytes * ((1 - missed) / c.again + missed / c.hbm)
    compute = work.token_heads * c.token_us / machine.units * (1 + c.balance * work.idle)
    fixed = c.launch_us + work.rows * c.row_us + work.pieces * c.part_us + work.busy * c.busy_us
    return Cost(fixed + _hard_max(memory, compute), memory, compute, fixed)


def shared_cost(work: SharedWork, c: SharedConstants, machine: Machine) -> Cost:
    """Predicted time of a shared regime."""
    read = work.prefix_bytes / c.hbm + work.again_bytes / c.again
    compute = (work.operations / work.filled + c.overhead * work.tile_operations) / c.rate if work.items else 0.0
    prefix = _soft_max(read, compute)
    private = _soft_max(work.tail_bytes / c.tail, work.tail_token_heads * c.token_us / machine.units)
    tail = private + work.rounds * c.round_us
    fixed = c.launch_us + work.items * c.item_us + work.state_bytes / c.state + work.partials * c.part_us
    longer, shorter = (prefix, tail) if prefix >= tail else (tail, prefix)
    return Cost(fixed + longer + (1 - c.overlap) * shorter, read + private, compute, fixed)


def _soft_max(a: float, b: float) -> float:
    """The larger, and up to 19% more where both are near: loads and products never overlap perfectly."""
    a2, b2 = a * a, b * b
    return sqrt(sqrt(a2 * a2 + b2 * b2))


def _hard_max(a: float, b: float) -> float:
    """The larger, and up to 9% more where both are near: so well do FlashInfer's loads hide behind its products."""
    a4, b4 = (a * a) * (a * a), (b * b) * (b * b)
    return sqrt(sqrt(sqrt(a4 * a4 + b4 * b4)))


def predict(f: Features, c: Constants, regimes: tuple[Regime, ...]) -> list[Cost]:
    """Predicted cost of one layer under UNIFORM, and then under each of ``regimes``."""
    stock = c.plain if is_plain(f.shape, c.machine) else c.uniform
    costs = [uniform_cost(uniform_work(f, c.machine), stock, c.machine)]
    for regime in regimes:
        own = c.gemm if regime is _GEMM else c.cascade
        costs.append(shared_cost(shared_work(f, c.machine, regime), own, c.machine))
    return costs


def all_reduce_us(shape: Shape, rows: int, link: Link) -> float:
    """The all-reduce behind each attention layer: a cost of the layer that no regime changes."""
    if shape.tp == 1:
        return 0.0
    return link.us_of(rows * shape.row_bytes * shape.tp)


def work_of(f: Features, machine: Machine, regime: Regime) -> Work:
    """The work of any regime, for fitting."""
    return uniform_work(f, machine) if regime is Regime.UNIFORM else shared_work(f, machine, regime)


def cost_of(work: Work, constants: UniformConstants | SharedConstants, machine: Machine) -> Cost:
    """The cost of any work, for fitting."""
    if isinstance(work, UniformWork):
        assert isinstance(constants, UniformConstants)
        return uniform_cost(work, constants, machine)
    assert isinstance(constants, SharedConstants)
    return shared_cost(work, constants, machine)


def analytic(machine: Machine) -> Constants:
    """Constants for a device nobody has measured: data-sheet orders of magnitude, and the thresholds' experience."""
    if machine.kind is _CPU:
        shared = SharedConstants(40, 60, 6e3, 12e3, 6e4, 0.5, 2.5e3, 0.002, 1, 4e3, 0.1, 0.05)
        uniform = UniformConstants(20, 100, 2.5e3, 3e3, 0.05, 0.002, 0.1, 1, 0.05)
        both = (Regime.CASCADE, Regime.BATCHED_GEMM)
        return Constants(machine, uniform, uniform, shared, shared, Link(50, 1e3), 0.05, both)
    scale = machine.units / 132
    hbm, again = 4.0e6 * scale, 9e6 * scale
    uniform = UniformConstants(9, 0.01, hbm, 1.5e7 * scale, 0.2, 8.5e-3, 0.04, 2, 0.5)
    plain = UniformConstants(9, 0.01, hbm, 1.5e7 * scale, 0.2, 8.5e-3, 0.04, 2, 0.5)
    gemm = SharedConstants(7, 0.02, hbm, again, 1.4e9 * scale, 4, hbm, 8e-3, 1, 8e6 * scale, 0.12, 0.5)
    cascade = SharedConstants(22, 0.05, hbm, again, 1e9 * scale, 6, 3e6 * scale, 8e-3, 1, 6e6 * scale, 0.1, 0.05)
    return Constants(machine, uniform, plain, cascade, gemm, Link(12, 2e5), 0.1, (Regime.BATCHED_GEMM,))
