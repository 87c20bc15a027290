"""Where to make room for an extent when no free run is long enough. Pure numpy, on the host; promotions only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FREE = 0
BLOCKED = np.iinfo(np.int64).max
"""Rank of a slot nobody may take: held by a live request, or a locked node's."""


def least_recent_window(rank: npt.NDArray[np.int64], length: int, align: int) -> int | None:
    """Start of the window of ``length`` slots, aligned, whose most recently used slot is the oldest.

    Args:
        rank: int64 ``[slots]``; :data:`FREE`, a recency rank from 1 (oldest) for an evictable slot, or :data:`BLOCKED`.
        length, align: slots.

    Returns:
        The first slot, ties to the highest; None when every window holds a blocked slot.
    """
    whole, rest = divmod(length, align)
    blocks = -(-rank.size // align)
    padded = np.full((blocks + whole + 1) * align, BLOCKED, dtype=np.int64)
    padded[: rank.size] = rank
    grid = padded.reshape(-1, align)
    worst = np.zeros(blocks, dtype=np.int64)
    if rest:
        worst = np.maximum(worst, grid[whole : whole + blocks, :rest].max(axis=1))
    if whole:
        block_max = grid.max(axis=1)[: blocks + whole - 1]
        worst = np.maximum(worst, np.lib.stride_tricks.sliding_window_view(block_max, whole).max(axis=1))
    best = int(worst.min())
    if best == BLOCKED:
        return None
    return int(np.flatnonzero(worst == best)[-1]) * align
