"""Prefill over HOT prefixes: from items and token counts to the index arrays that engines read. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from granikv_sglang.plan.base import Item

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Level:
    """Items of one depth of the forest, or some of them: a token of the pass is in at most one.

    The caches seen as one ragged batch: segment s holds slots ``kv_indptr[s] .. kv_indptr[s + 1]`` and is read by the
    tokens ``qo_indptr[s] .. qo_indptr[s + 1]`` of the gathered order; what lies between two items is a segment that
    nobody reads.

    Attributes:
        qo_indptr, kv_indptr: int32 ``[segments + 1]``.
        tokens: int32 ``[gathered]``, token of the pass at each place of the gathered order.
    """

    qo_indptr: Ints
    kv_indptr: Ints
    tokens: Ints

    def run_of(self, total: int) -> slice | None:
        """The tokens as one run of the pass's ``total`` tokens, where they are one: no gather is needed then."""
        first, count = int(self.tokens[0]), self.tokens.size
        if count <= total - first and np.array_equal(self.tokens, np.arange(first, first + count, dtype=np.int32)):
            return slice(first, first + count)
        return None


MOST_RUNS = 4
"""Parts that a level is cut into so that no query has to be gathered; each is a launch of its own."""


@dataclass(frozen=True)
class ColdPart:
    """Cached tokens that no dense stretch holds, each row's side by side. Their order in a row is of no account.

    Attributes:
        kv_indptr: int32 ``[rows + 1]``.
        rows, positions: int32 ``[tokens]``, the request and the position in it of each cached token.
    """

    kv_indptr: Ints
    rows: Ints
    positions: Ints


def token_offsets(extend_lens: Sequence[int]) -> Ints:
    """int32 ``[rows + 1]``: where each row's new tokens start in the pass."""
    offsets = np.zeros(len(extend_lens) + 1, dtype=np.int32)
    np.cumsum(np.asarray(extend_lens, dtype=np.int64), out=offsets[1:])
    return offsets


def levels_of(items: Sequence[Item], offsets: Ints, granule: int = 1) -> list[Level]:
    """The items level by level; parents come before children in ``items``, as :func:`build_items` gives them.

    ``granule``: an engine reads whole multiples of it; what is left at an item's end is :func:`cold_part`'s.
    """
    depth = np.zeros(offsets.size - 1, dtype=np.int32)
    by_level: dict[int, list[Item]] = {}
    for item in items:
        if item.tokens >= granule:
            rows = list(item.rows)
            level = int(depth[rows].max())
            depth[rows] = level + 1
            by_level.setdefault(level, []).append(item)
    return [part for level in sorted(by_level) for part in _parts(by_level[level], offsets, granule)]


def _parts(items: Sequence[Item], offsets: Ints, granule: int) -> list[Level]:
    """One level, in the batch's order where that leaves few parts in which the stretches ascend, as a ragged batch's
    must. Its tokens are runs of the pass then, which need no gathering."""
    runs: list[list[Item]] = []
    for item in sorted(items, key=lambda i: i.rows[0]):
        if runs and runs[-1][-1].start < item.start and runs[-1][-1].rows[-1] + 1 == item.rows[0]:
            runs[-1].append(item)
        else:
            runs.append([item])
    if len(runs) <= MOST_RUNS:
        parts = [_level(run, offsets, granule) for run in runs]
        if all(part.run_of(int(offsets[-1])) is not None for part in parts):
            return parts
    return [_level(sorted(items, key=lambda i: i.start), offsets, granule)]


def _level(items: Sequence[Item], offsets: Ints, granule: int) -> Level:
    qo, kv = [0], [0]
    tokens: list[Ints] = []
    for item in items:
        if item.start > kv[-1]:
            qo.append(qo[-1])
            kv.append(item.start)
        own = [np.arange(offsets[row], offsets[row + 1], dtype=np.int32) for row in item.rows]
        tokens += own
        qo.append(qo[-1] + sum(part.size for part in own))
        kv.append(item.start + item.tokens // granule * granule)
    return Level(np.array(qo, np.int32), np.array(kv, np.int32), np.concatenate(tokens))


def cold_part(items: Sequence[Item], prefix_lens: Sequence[int], granule: int = 1) -> ColdPart:
    """Cached tokens outside of what :func:`levels_of` gives: ends of items, and what no item covers.

    A row's items together cover a leading span of at most its ``prefix_lens`` tokens.
    """
    covered = np.zeros(len(prefix_lens), dtype=np.int32)
    pieces: list[tuple[int, int, int]] = []  # row, first position, end
    for item in items:
        rest = item.tokens % granule if item.tokens >= granule else item.tokens
        for row in item.rows:
            end = int(covered[row]) + item.tokens
            if rest:
                pieces.append((row, end - rest, end))
            covered[row] = end
    pieces += [(row, int(covered[row]), end) for row, end in enumerate(prefix_lens) if covered[row] < end]
    pieces.sort()
    row_of, first, end_of = (np.array(column, np.int32) for column in zip(*pieces, strict=True)) if pieces else _NONE
    lens = end_of - first
    start = np.cumsum(lens) - lens
    positions = np.arange(lens.sum(), dtype=np.int32) + np.repeat(first - start, lens).astype(np.int32)
    rows = np.repeat(row_of, lens)
    counts = np.bincount(rows, minlength=len(prefix_lens))
    return ColdPart(token_offsets(counts.tolist()), rows, positions)


_NONE = (np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))


def query_tiles(items: Sequence[Item], extend_lens: Sequence[int], q_heads: int, tile: int = 128) -> int:
    """Query tiles, (128 tokens, one head) each, that the pass has for its items: what a GPU spreads over its SMs."""
    return sum(-(-sum(extend_lens[row] for row in item.rows) // tile) for item in items) * q_heads
