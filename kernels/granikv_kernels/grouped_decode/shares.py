"""Items cut into equal shares of work, one for each program: the stream-K decomposition (Osama et al. 2023).

A common chunk size leaves some programs with one chunk more than others. Here the tiles of all items stand in one line,
each item's first tile behind what a unit costs besides its tiles; the line is cut at equal distances, and a share that
meets the end of an item goes on with the next one. Every KV head is cut alike, so an item has as many splits in each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SNAP = 2
"""A cut this many tiles from an item's end moves there: so short a unit costs more than it evens out."""


@dataclass(frozen=True)
class Shares:
    """Units of one KV head, in the order of the line.

    Attributes:
        item, split: int ``[units]``, the item of a unit and its place among the item's units.
        first, end: int ``[units]``, tiles of the item.
        share, turn: int ``[units]``, which share it belongs to and its place in it.
        splits: int ``[items]``.
        span: cost of the longest share in tiles.
    """

    item: npt.NDArray[Any]
    split: npt.NDArray[Any]
    first: npt.NDArray[Any]
    end: npt.NDArray[Any]
    share: npt.NDArray[Any]
    turn: npt.NDArray[Any]
    splits: npt.NDArray[Any]
    span: float


def cut(tiles: npt.NDArray[Any], shares: int, overhead: float) -> Shares:
    """Cut items of ``tiles [items]`` (each at least 1) into at most ``shares`` shares of about equal cost.

    ``overhead`` is what a unit costs besides its tiles, in tiles.
    """
    upto = np.cumsum(tiles + overhead)
    begin = upto - tiles - overhead
    at = np.arange(1, shares) * (upto[-1] / shares)
    cut_item = np.searchsorted(upto, at, side="right")
    cut_tile = np.clip(np.rint(at - begin[cut_item] - overhead), 0, tiles[cut_item]).astype(np.int64)
    cut_tile[cut_tile <= SNAP] = 0
    near_end = tiles[cut_item] - cut_tile <= SNAP
    cut_tile[near_end] = tiles[cut_item][near_end]

    # In tiles without overheads, cuts and item starts are plain numbers on one line; a unit runs from one to the next.
    item_end = np.cumsum(tiles)
    item_begin = item_end - tiles
    cuts = item_begin[cut_item] + cut_tile
    edges = np.unique(np.concatenate((item_begin, cuts, item_end[-1:])))
    starts, ends = edges[:-1], edges[1:]
    item = np.searchsorted(item_end, starts, side="right")
    share = np.searchsorted(cuts, starts, side="right")
    cost = np.bincount(share, weights=ends - starts + overhead, minlength=shares)
    splits = np.bincount(item, minlength=tiles.size)
    return Shares(
        item=item,
        split=_place(item),
        first=starts - item_begin[item],
        end=ends - item_begin[item],
        share=share,
        turn=_place(share),
        splits=splits,
        span=float(cost.max()),
    )


def _place(owner: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """For ascending owners, each entry's place among those of its owner."""
    return np.arange(owner.size) - np.searchsorted(owner, owner, side="left")
