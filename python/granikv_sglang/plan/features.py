"""What the classifier knows about one decode pass: whole numbers only, so that every rank computes with the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import NamedTuple

from granikv_sglang.core import Regime
from granikv_sglang.plan.base import Item


@dataclass(frozen=True)
class Shape:
    """Attention of one rank: heads after tensor parallelism, ``element`` bytes a value, ``tp`` ranks in all."""

    q_heads: int
    kv_heads: int
    head_dim: int
    element: int = 2
    layers: int = 1
    tp: int = 1

    @cached_property
    def gqa(self) -> int:
        """Query heads per KV head."""
        return max(1, self.q_heads // self.kv_heads)

    @cached_property
    def token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element

    @cached_property
    def row_bytes(self) -> int:
        """The attention output of one request in one layer, on this rank."""
        return self.q_heads * self.head_dim * self.element


BLOCK = 64
"""Slots of a tile of both CUDA engines."""


class Counted(NamedTuple):
    """What a shared regime's engine does with the shared stretches, whatever the private tails are.

    Attributes:
        again_bytes: K and V bytes that further tiles of query rows read again.
        operations: of all tiles of query rows by slots, padding included; ``tile_operations`` of one tile on each unit.
        filled: the share of the multiprocessors that the stretches keep busy.
        partials: how many partial results of stretches a request's merge reads in turn.
    """

    again_bytes: int
    operations: int
    tile_operations: int
    filled: float
    partials: float


class Features(NamedTuple):
    """One decode pass. A tuple, as the works and costs made of it: made in each classification, in a third of the time.

    Attributes:
        shape: the attention layer.
        rows: requests in the batch.
        tokens, members: tokens of each shared stretch, and the requests that share it. Lists: at the sizes of a batch
            they take less time than numpy's arrays, and add up exactly.
        blocks: of each stretch, the blocks of :data:`BLOCK` slots that it fills.
        most: most members.
        unique, reads, pairs: sums of the tokens, of tokens times members, and of the members.
        longest: most shared tokens that one request has.
        cold: tokens of all requests that lie in no shared stretch.
        counted: what :mod:`work` has counted of these stretches for each shared regime; kept while membership stands.
    """

    shape: Shape
    rows: int
    tokens: list[int]
    members: list[int]
    blocks: list[int]
    most: int
    unique: int
    reads: int
    pairs: int
    longest: int
    cold: int
    counted: dict[Regime, Counted]

    @staticmethod
    def of(items: Sequence[Item], longest: int, rows: int, shape: Shape, all_tokens: int) -> Features:
        """Features of a batch of ``rows`` requests with ``all_tokens`` tokens in their contexts."""
        tokens = [item.tokens for item in items]
        members = [len(item.rows) for item in items]
        reads = sum(map(mul, tokens, members))
        return Features(
            shape, rows, tokens, members, [-(-count // BLOCK) for count in tokens], max(members, default=0),
            sum(tokens), reads, sum(members), longest, _cold(rows, all_tokens, reads), {},
        )  # fmt: skip

    def grown(self, all_tokens: int) -> Features:
        """The same batch when its contexts have ``all_tokens`` tokens."""
        # By place, in a third of the time that ``_replace`` takes.
        return Features(*self[:-2], _cold(self.rows, all_tokens, self.reads), self.counted)


def _cold(rows: int, all_tokens: int, reads: int) -> int:
    """A request keeps at least the token being decoded; a count that lags by a token must not go below that."""
    return max(rows, all_tokens - reads)
