"""What the classifier knows about one decode pass: whole numbers only, so that every rank computes with the same."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from granikv_sglang.plan.base import Item

Ints = npt.NDArray[np.int64]


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


class Tiles(NamedTuple):
    """Shared stretches cut into tiles of ``height`` query rows by 64 slots.

    ``area`` is query rows times slots of all tiles, padding included; ``covered`` is tokens of each stretch times the
    tiles of query rows that read it.
    """

    height: int
    area: int
    covered: int


class Features(NamedTuple):
    """One decode pass. A tuple, as the works and costs made of it: made in each classification, in a third of the time.

    Attributes:
        shape: the attention layer.
        rows: requests in the batch.
        tokens, members: int64 ``[items]``, tokens of each shared stretch and the requests that share it.
        most: most members.
        unique, reads, pairs: sums of the tokens, of tokens times members, and of the members.
        longest: most shared tokens that one request has.
        cold: tokens of all requests that lie in no shared stretch.
        tiles, pieces: what :mod:`work` has counted of these stretches, by height; kept while membership stands.
    """

    shape: Shape
    rows: int
    tokens: Ints
    members: Ints
    most: int
    unique: int
    reads: int
    pairs: int
    longest: int
    cold: int
    tiles: dict[int, Tiles]
    pieces: dict[int, tuple[float, float]]

    @staticmethod
    def of(items: Sequence[Item], longest: int, rows: int, shape: Shape, all_tokens: int) -> Features:
        """Features of a batch of ``rows`` requests with ``all_tokens`` tokens in their contexts."""
        tokens = [item.tokens for item in items]
        members = [len(item.rows) for item in items]
        # Packed by the array module, in half the time that numpy takes for a list, and both at once.
        both = np.frombuffer(array("q", tokens + members), np.int64)
        token_array, member_array = both[: len(tokens)], both[len(tokens) :]
        reads = int(token_array.dot(member_array))
        return Features(
            shape, rows, token_array, member_array, max(members, default=0), sum(tokens), reads, sum(members), longest,
            _cold(rows, all_tokens, reads), {}, {},
        )  # fmt: skip

    def grown(self, all_tokens: int) -> Features:
        """The same batch when its contexts have ``all_tokens`` tokens."""
        return self._replace(cold=_cold(self.rows, all_tokens, self.reads))


def _cold(rows: int, all_tokens: int, reads: int) -> int:
    """A request keeps at least the token being decoded; a count that lags by a token must not go below that."""
    return max(rows, all_tokens - reads)
