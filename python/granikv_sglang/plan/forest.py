"""From each request's HOT path to the forest of items: who shares which slots. Decided by slots, never by text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from granikv_sglang.core import Span
from granikv_sglang.plan.base import Item, Path


def build_items(paths: Sequence[Path], min_item_tokens: int = 1, min_members: int = 2) -> tuple[Item, ...]:
    """Items of a batch, parents before children.

    Args:
        paths: HOT path of each row.
        min_item_tokens: an item shorter than this is dropped when nothing below it is kept; its tokens stay in the
        tails.
        min_members: a node with fewer makes no item. Decode gains from two on; prefill gains from a dense read by one.

    Nodes one below the other with the same members and adjoining slots make one.
    """
    rows_of: dict[int, list[int]] = {}
    spans: dict[int, Span] = {}
    parent: dict[int, int | None] = {}
    for row, path in enumerate(paths):
        above: int | None = None
        for node_id, span in path:
            if node_id not in rows_of:
                rows_of[node_id], spans[node_id], parent[node_id] = [], span, above
            rows_of[node_id].append(row)
            above = node_id
    items: list[Item] = []
    place: dict[int, int] = {}
    above_item: list[int | None] = []
    for node_id, rows in rows_of.items():
        if len(rows) < min_members:
            continue
        span, up = spans[node_id], parent[node_id]
        over = place[up] if up is not None else None
        if over is not None and len(items[over].rows) == len(rows):
            joined = items[over]
            if joined.start + joined.tokens == span.start:
                items[over] = Item(joined.start, joined.tokens + span.length, joined.rows, node_id)
                place[node_id] = over
                continue
        place[node_id] = len(items)
        above_item.append(over)
        items.append(Item(span.start, span.length, tuple(rows), node_id))
    return _drop_short_ends(items, above_item, min_item_tokens)


def _drop_short_ends(items: list[Item], above: list[int | None], min_item_tokens: int) -> tuple[Item, ...]:
    """Drop short items from the leaves up; one with a kept item below it stays, or coverage would have a hole."""
    keep = [False] * len(items)
    for index in range(len(items) - 1, -1, -1):
        if keep[index] or items[index].tokens >= min_item_tokens:
            keep[index] = True
            over = above[index]
            if over is not None:
                keep[over] = True
    return tuple(item for item, kept in zip(items, keep, strict=True) if kept)


def coverage_of(items: Sequence[Item], rows: int) -> npt.NDArray[np.int32]:
    """int32 ``[rows]``: tokens of each row that its items cover."""
    coverage = np.zeros(rows, dtype=np.int32)
    for item in items:
        coverage[list(item.rows)] += item.tokens
    return coverage
