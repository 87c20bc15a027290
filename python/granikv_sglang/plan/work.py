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
from granikv_sglang.plan.features import BLOCK, Counted, Features, Shape


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
    # All at once, as in all that a classification runs through: by name each would take as long as a product.
    shape, rows, tokens, _, _, _, unique, reads, _, shared, cold, _ = f
    token_bytes, kv_heads = shape.token_bytes, shape.kv_heads
    longest = shared + cold // (rows or 1)
    pieces, busy, idle, waves = 0.0, 0.0, 0.0, 0
    if machine.kind is not _CPU:
        units = machine.units
        blocks, places = rows * kv_heads, 2 * units
        if blocks > places:
            waves = -(-blocks // places) - 1
        elif blocks:
            pieces = min(longest / PIECE, places / blocks)
        # Where they are few, all else being equal, a layer takes 2 us less on an H200; the step is as steep as this.
        busy = ((pieces if pieces > 1 else 1.0) * blocks / units - 0.55) / 0.2
        busy = 1.0 if busy > 1 else busy if busy > 0 else 0.0
        idle = _idle(blocks, reads + cold, longest, rows, places)
    # By place: names would take as long as the sums.
    return UniformWork(
        rows, unique * token_bytes, reads * token_bytes, cold * token_bytes, len(tokens),
        reads * kv_heads, cold * kv_heads, pieces, busy, idle, waves,
    )  # fmt: skip


def _idle(blocks: int, total: int, longest: int, rows: int, places: int) -> float:
    """FlashInfer's decode: ``blocks`` (request, KV head) pairs over ``places``; few are split, many run in waves."""
    if blocks == 0 or total == 0:
        return 0.0
    even = total * blocks / (rows * places)  # tokens a place would have to read
    alike = 10 * total >= 9 * rows * longest  # all about equally long
    if blocks <= places:
        span = longest / (places // blocks) if alike else total / (places * rows / blocks - rows / 2)
        span = min(span, float(longest))
    else:
        # What starts together ends together: whole waves. Uneven ones fill each other's gaps.
        span = float(-(-blocks // places) * longest)
        if not alike:
            span = min(span, even + longest / 2)
    return span / even - 1 if span > even else 0.0


def shared_work(f: Features, machine: Machine, regime: Regime) -> SharedWork:
    """Work of the engine behind a shared regime."""
    shape, rows, tokens, _, _, _, unique, _, pairs, _, cold, known = f
    counted = known.get(regime)
    if counted is None:
        counted = known[regime] = _count(f, machine, regime)
    again_bytes, operations, tile_operations, filled, partials = counted
    token_bytes, kv_heads = shape.token_bytes, shape.kv_heads
    rounds = 0.0
    if regime is _GEMM and machine.kind is not _CPU and tokens:
        units = machine.units
        pieces, each = _tail_pieces(rows, cold, units, kv_heads)
        partials += pieces
        whole = -(-rows * pieces * kv_heads // units)
        # Shared memory decides how many run side by side: twice as many of head size 64 as of 128.
        rounds = whole * shape.head_dim / 128
        cold = max(cold, whole * units * each * BLOCK // kv_heads)
    # By place: names would take as long as the sums.
    return SharedWork(
        len(tokens), unique * token_bytes, again_bytes, operations, tile_operations, cold * token_bytes,
        cold * kv_heads, max(pairs + rows, round(rows * partials)) * shape.row_bytes, filled, partials, rounds,
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
        area, again = _tiles(f, height)
        if not small:
            area -= _narrower(f)
        if f.tokens:
            filled, partials = _pieces(f.longest, area, height, machine.units / shape.kv_heads)
    else:
        height = _cascade_tile(f.rows * shape.gqa)
        area, again = _tiles(f, height)
    # By place, as above.
    return Counted(
        again * shape.token_bytes, area * operations * shape.kv_heads, height * BLOCK * operations * machine.units,
        filled, partials,
    )  # fmt: skip


def _tiles(f: Features, height: int) -> tuple[int, int]:
    """The stretches cut into tiles of ``height`` query rows by 64 slots, for one KV head.

    Returns query rows times slots of all tiles, padding included; and how many tokens further tiles of query rows read
    again.
    """
    gqa = f.shape.gqa
    if f.most * gqa <= height:
        return sum(f.blocks) * height * BLOCK, 0
    passes = [-(-members * gqa // height) for members in f.members]
    return sum(map(mul, f.blocks, passes)) * height * BLOCK, sum(map(mul, f.tokens, passes)) - f.unique


def _narrower(f: Features) -> int:
    """What the tiles lose in area where the Triton engine gives items to its narrow grid, at half the height."""
    most = NARROW_ROWS // f.shape.gqa
    stretches = zip(f.tokens, f.members, f.blocks, strict=True)
    narrow = [(tokens, blocks) for tokens, members, blocks in stretches if members <= most]
    if sum([tokens for tokens, _ in narrow]) * f.shape.kv_heads < NARROW_LEAST:
        return 0
    return sum([blocks for _, blocks in narrow]) * 64 * BLOCK


def _pieces(longest: int, area: int, height: int, room: float) -> tuple[float, float]:
    """How full the Triton engine's planner makes the multiprocessors, and in how many pieces a request's prefix lies.

    It cuts a KV head's tiles into as many pieces as there is room for, or fewer: where the merge would take longer.
    """
    count = area / (height * BLOCK)
    tiles = -(-longest // BLOCK)
    pieces = max(1.0, min(room, count / sqrt(PART_TILES * tiles)))
    return min(1.0, pieces / room), min(float(tiles), max(1.0, pieces * tiles / count))


def _tail_pieces(rows: int, cold: int, units: int, kv_heads: int) -> tuple[int, int]:
    """In how many pieces it cuts one request's private tokens, where all have about as many, and a piece's tiles."""
    most = -(-cold // ((TAIL_UNITS * units // kv_heads) or 1))
    tiles = -(-(cold // rows) // BLOCK)
    pieces = -(-tiles // max(-(-most // BLOCK), ceil(sqrt(PART_TILES * tiles))))
    return pieces, -(-tiles // pieces)


def _cascade_tile(query_rows: int) -> int:
    """Query rows of FlashInfer's tile: the cascade engine plans so that small batches get a small one."""
    return 16 if query_rows <= 16 else 64 if query_rows <= 64 else 128


def work_of(f: Features, machine: Machine, regime: Regime) -> Work:
    """The work of any regime, for fitting."""
    return uniform_work(f, machine) if regime is Regime.UNIFORM else shared_work(f, machine, regime)
