"""What each regime's engine does in a decode pass: bytes, operations, pieces. Counted and not fitted.

What is said of the engines here (tiles, pieces, thresholds) are facts of their code, which tests hold against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil, sqrt
from operator import mul
from typing import NamedTuple

from granikv_sglang.core import Regime
from granikv_sglang.plan.features import Counted, Features, Shape


class Kind(StrEnum):
    """Which engines compute the regimes; their tiles are facts of the code, not constants to fit."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True)
class Machine:
    """What is known of a device without measuring. ``units`` is multiprocessors of a GPU, 1 for a CPU."""

    kind: Kind
    units: int


class UniformWork(NamedTuple):
    """What UNIFORM does.

    ``prefix_bytes`` and ``tail_bytes`` are read once, ``read_bytes`` as often as requests read a prefix. ``idle`` is
    the span of uneven work over that of even work, less one; ``waves`` how many rounds of thread blocks follow the
    first.
    """

    rows: int
    prefix_bytes: int
    read_bytes: int
    tail_bytes: int
    streams: int
    prefix_token_heads: int
    tail_token_heads: int
    pieces: float
    busy: float
    idle: float
    waves: int


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
SOFTMAX = 2048
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
PART_TILES = 0.15
"""What the Triton engine takes one more partial result of a request for, in tiles."""
TAIL_UNITS = 4
"""(Piece of a tail, KV head) pairs for each multiprocessor that it aims at."""
NARROW_ROWS, NARROW_LEAST = 32, 8 * 32768
"""When its other variant takes the narrow grid: query rows of an item, tokens times KV heads of such items together."""


def is_plain(shape: Shape, machine: Machine) -> bool:
    """Whether the stock backend decodes without tensor cores."""
    return shape.gqa < PLAIN_GQA and machine.kind is not _CPU


def uniform_work(f: Features, machine: Machine) -> UniformWork:
    """Work of the stock backend."""
    token_bytes, kv_heads = f.shape.token_bytes, f.shape.kv_heads
    total = f.reads + f.cold
    blocks, places = f.rows * kv_heads, 2 * machine.units
    longest = f.longest + f.cold // max(1, f.rows)
    pieces, busy, idle, waves = 0.0, 0.0, 0.0, 0
    if machine.kind is not _CPU:
        if 0 < blocks <= places:
            pieces = min(longest / PIECE, places / blocks)
        # Where they are few, all else being equal, a layer takes 2 us less on an H200; the step is as steep as this.
        busy = max(0.0, min(1.0, (max(1.0, pieces) * blocks / machine.units - 0.55) / 0.2))
        idle = _idle(blocks, total, longest, f.rows, places)
        waves = max(0, -(-blocks // places) - 1)
    # By place: names would take as long as the sums.
    return UniformWork(
        f.rows, f.unique * token_bytes, f.reads * token_bytes, f.cold * token_bytes, len(f.tokens),
        f.reads * kv_heads, f.cold * kv_heads, pieces, busy, idle, waves,
    )  # fmt: skip


def _idle(blocks: int, total: int, longest: int, rows: int, places: int) -> float:
    """FlashInfer's decode: ``blocks`` (request, KV head) pairs over ``places``; few are split, many run in waves."""
    if blocks == 0 or total == 0:
        return 0.0
    even = total * blocks / (rows * places)  # tokens a place would have to read
    alike = 10 * total >= 9 * rows * longest  # all about equally long
    if blocks <= places:
        span = longest / (places // blocks) if alike else total / (places * rows / blocks - rows / 2)
        return max(0.0, min(span, float(longest)) / even - 1)
    # What starts together ends together: whole waves. Uneven ones fill each other's gaps.
    waves = float(-(-blocks // places) * longest)
    return max(0.0, (waves if alike else min(waves, even + longest / 2)) / even - 1)


def shared_work(f: Features, machine: Machine, regime: Regime) -> SharedWork:
    """Work of the engine behind a shared regime."""
    counted = f.counted.get(regime)
    if counted is None:
        counted = f.counted[regime] = _count(f, machine, regime)
    again_bytes, operations, tile_operations, filled, partials = counted
    shape = f.shape
    token_bytes, kv_heads = shape.token_bytes, shape.kv_heads
    rounds, cold = 0.0, f.cold
    if regime is _GEMM and machine.kind is not _CPU and f.tokens:
        pieces, each = _tail_pieces(f, machine)
        partials += pieces
        whole = -(-f.rows * pieces * kv_heads // machine.units)
        padded = whole * machine.units * each * BLOCK // kv_heads
        # Shared memory decides how many run side by side: twice as many of head size 64 as of 128.
        rounds = whole * shape.head_dim / 128
        cold = max(cold, padded)
    # By place: names would take as long as the sums.
    return SharedWork(
        len(f.tokens), f.unique * token_bytes, again_bytes, operations, tile_operations, cold * token_bytes,
        cold * kv_heads, max(f.pairs + f.rows, round(f.rows * partials)) * shape.row_bytes, filled, partials, rounds,
    )  # fmt: skip


def _count(f: Features, machine: Machine, regime: Regime) -> Counted:
    """The part of a shared regime's work that only a change of membership changes."""
    shape = f.shape
    if machine.kind is _CPU:
        # Its engine pads nothing and stacks the query rows of a stretch.
        operations = 4 * shape.head_dim
        return Counted(0, f.reads * shape.gqa * operations * shape.kv_heads, operations * machine.units, 1.0, 0.0)
    operations = 4 * shape.head_dim + SOFTMAX
    filled, partials = 1.0, 0.0
    if regime is _GEMM:
        small = f.most * shape.gqa <= SMALL_ROWS
        height = SMALL_ROWS if small else 128
        area, covered = _tiles(f, height)
        if not small:
            area -= _narrower(f)
        if f.tokens:
            filled, partials = _pieces(f, area, height, machine)
    else:
        height = _cascade_tile(f.rows * shape.gqa)
        area, covered = _tiles(f, height)
    again_bytes = (covered - f.unique) * shape.token_bytes
    tile_operations = height * BLOCK * operations * machine.units
    return Counted(again_bytes, area * operations * shape.kv_heads, tile_operations, filled, partials)


def _tiles(f: Features, height: int) -> tuple[int, int]:
    """The stretches cut into tiles of ``height`` query rows by 64 slots, for one KV head.

    Returns query rows times slots of all tiles, padding included; and tokens of each stretch times the tiles of query
    rows that read it.
    """
    blocks = [(tokens + (BLOCK - 1)) // BLOCK for tokens in f.tokens]
    gqa = f.shape.gqa
    if f.most * gqa <= height:
        return sum(blocks) * height * BLOCK, f.unique
    passes = [(members * gqa + (height - 1)) // height for members in f.members]
    return sum(map(mul, blocks, passes)) * height * BLOCK, sum(map(mul, f.tokens, passes))


def _narrower(f: Features) -> int:
    """What the tiles lose in area where the Triton engine gives items to its narrow grid, at half the height."""
    members = NARROW_ROWS // f.shape.gqa
    narrow = [tokens for tokens, count in zip(f.tokens, f.members, strict=True) if count <= members]
    if sum(narrow) * f.shape.kv_heads < NARROW_LEAST:
        return 0
    return sum([(tokens + (BLOCK - 1)) // BLOCK for tokens in narrow]) * 64 * BLOCK


def _pieces(f: Features, area: int, height: int, machine: Machine) -> tuple[float, float]:
    """How full the Triton engine's planner makes the multiprocessors, and in how many pieces a request's prefix lies.

    It cuts a KV head's tiles into as many pieces as there is room for, or fewer: where the merge would take longer.
    """
    room = machine.units / f.shape.kv_heads
    count = area / (height * BLOCK)
    longest = (f.longest + (BLOCK - 1)) // BLOCK
    pieces = max(1.0, min(room, count / sqrt(PART_TILES * longest)))
    return min(1.0, pieces / room), min(float(longest), max(1.0, pieces * longest / count))


def _tail_pieces(f: Features, machine: Machine) -> tuple[int, int]:
    """In how many pieces it cuts one request's private tokens, where all have about as many, and a piece's tiles."""
    most = -(-f.cold // max(1, TAIL_UNITS * machine.units // f.shape.kv_heads))
    tiles = -(-(f.cold // f.rows) // BLOCK)
    pieces = -(-tiles // max(-(-most // BLOCK), ceil(sqrt(PART_TILES * tiles))))
    return pieces, -(-tiles // pieces)


def _cascade_tile(query_rows: int) -> int:
    """Query rows of FlashInfer's tile: the cascade engine plans so that small batches get a small one."""
    return 16 if query_rows <= 16 else 64 if query_rows <= 64 else 128


def work_of(f: Features, machine: Machine, regime: Regime) -> Work:
    """The work of any regime, for fitting."""
    return uniform_work(f, machine) if regime is Regime.UNIFORM else shared_work(f, machine, regime)
