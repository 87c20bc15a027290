"""From each request's HOT path to the forest of items: who shares which slots. Decided by slots, never by text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from granikv_sglang.core import Span
from granikv_sglang.plan.base import Item, Path


def build_items(paths: Sequence[Path], min_item_tokens: int = 1, min_members: int = 2) -> tuple[Item, ...]:
    """Items of a batch, parents before children.

    Args:
        paths: HOT path of each row.
        min_item_tokens: an item shorter than this is dropped when nothing below it is kept; its tokens stay in the
        tails. Where something is, it becomes the beginning of what adjoins it below, for those members: every prompt
        of a chat template begins with the same few tokens, and they are not worth an item of their own.
        min_members: a node with fewer makes no item. Decode gains from two on; prefill gains from a dense read by one.

    Nodes one below the other with the same members and adjoining slots make one.
    """
    rows_of: dict[int, list[int]] = {}
    spans: dict[int, Span] = {}
    parent: dict[int, int | None] = {}
    for path, on_path in _rows_by_path(paths):
        above: int | None = None
        for node_id, span in path:
            if node_id not in rows_of:
                rows_of[node_id], spans[node_id], parent[node_id] = [], span, above
            rows_of[node_id].extend(on_path)
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
        items.append(Item(span.start, span.length, tuple(sorted(rows)), node_id))
    return _join_short(items, _long_below(items, above_item, min_item_tokens), above_item, min_item_tokens)


def _rows_by_path(paths: Sequence[Path]) -> Iterable[tuple[Path, list[int]]]:
    """Each path once with its rows, by first row. By identity: the tree gives all sharers one object."""
    found: dict[int, tuple[Path, list[int]]] = {}
    for row, path in enumerate(paths):
        entry = found.get(id(path))
        if entry is None:
            found[id(path)] = (path, [row])
        else:
            entry[1].append(row)
    return found.values()


def _long_below(items: list[Item], above: list[int | None], min_item_tokens: int) -> list[bool]:
    """Whether an item is kept: it is long enough, or one below it is, and coverage would have a hole without it."""
    keep = [False] * len(items)
    for index in range(len(items) - 1, -1, -1):
        if keep[index] or items[index].tokens >= min_item_tokens:
            keep[index] = True
            over = above[index]
            if over is not None:
                keep[over] = True
    return keep


def _join_short(items: list[Item], keep: list[bool], above: list[int | None], min_item_tokens: int) -> tuple[Item, ...]:
    """The kept items, each short one joined to those below that adjoin it; it stays only for the members of others."""
    below: dict[int, list[int]] = {}
    for index, over in enumerate(above):
        if over is not None and keep[index]:
            below.setdefault(over, []).append(index)
    found: list[Item] = []
    for index, item in enumerate(items):
        if not keep[index]:
            continue
        if item.tokens < min_item_tokens:
            others: list[int] = []
            for lower in below.get(index, ()):
                joined = items[lower]
                if item.start + item.tokens == joined.start:
                    items[lower] = Item(item.start, item.tokens + joined.tokens, joined.rows, joined.node_id)
                else:
                    others.extend(joined.rows)
            if not others:
                continue
            item = Item(item.start, item.tokens, tuple(sorted(others)), item.node_id)
        found.append(item)
    return tuple(found)


def within(items: Sequence[Item], holds: Callable[[Sequence[Item]], bool]) -> tuple[Item, ...]:
    """The items without as few as an engine's buffers ask for; what is left out is read by each of its members.

    Items go in the order of what they save, the least first, but none before those below it: what is left still covers
    a leading span of every row.

    Args:
        items: a forest, parents before children.
        holds: whether the engine's buffers take a plan of these items. What it takes, it takes with fewer items too.

    Returns:
        The items kept, in their order; none where even one is too many.
    """
    above: list[int | None] = []
    children = [0] * len(items)
    last: dict[int, int] = {}
    for index, item in enumerate(items):
        over = last.get(item.rows[0])
        above.append(over)
        if over is not None:
            children[over] += 1
        last.update(dict.fromkeys(item.rows, index))
    leaves = [(item.tokens_not_reread, index) for index, item in enumerate(items) if children[index] == 0]
    heapify(leaves)
    goes: dict[int, int] = {}
    while leaves:
        _, index = heappop(leaves)
        goes[index] = len(goes)
        over = above[index]
        if over is not None:
            children[over] -= 1
            if children[over] == 0:
                heappush(leaves, (items[over].tokens_not_reread, over))

    def without(count: int) -> tuple[Item, ...]:
        return tuple(item for index, item in enumerate(items) if goes[index] >= count)

    return without(bisect_left(range(len(items) + 1), True, key=lambda count: holds(without(count))))


def coverage_of(items: Sequence[Item], rows: int) -> npt.NDArray[np.int32]:
    """int32 ``[rows]``: tokens of each row that its items cover."""
    coverage = [0] * rows
    for item in items:
        for row in item.rows:
            coverage[row] += item.tokens
    return np.array(coverage, dtype=np.int32)
