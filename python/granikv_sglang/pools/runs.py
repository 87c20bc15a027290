"""Contiguous runs in a set of free slots. Works on CPU and CUDA tensors; the only host transfer is the list of runs."""

from __future__ import annotations

import torch


def runs_of(sorted_slots: torch.Tensor) -> list[tuple[int, int]]:
    """Maximal runs of consecutive ids in an ascending int64 tensor, as host ``(start, length)`` pairs, ascending."""
    if sorted_slots.numel() == 0:
        return []
    breaks = torch.nonzero(sorted_slots[1:] != sorted_slots[:-1] + 1).flatten() + 1
    first = torch.cat([breaks.new_zeros(1), breaks])
    starts = sorted_slots[first].tolist()
    bounds = [*first.tolist(), sorted_slots.numel()]
    return [(start, bounds[i + 1] - bounds[i]) for i, start in enumerate(starts)]


def highest_aligned_start(runs: list[tuple[int, int]], length: int, align: int) -> int | None:
    """The highest slot that is a multiple of ``align`` and begins ``length`` free slots, or None.

    HOT grows down from the top while COLD hands out low slots first, so that long runs survive between the two.
    """
    for start, size in reversed(runs):
        candidate = (start + size - length) // align * align
        if candidate >= start:
            return candidate
    return None
