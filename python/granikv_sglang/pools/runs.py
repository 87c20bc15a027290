"""Contiguous runs in a set of free slots. Works on CPU and CUDA tensors; the only host transfer is the list of runs."""

from __future__ import annotations

from collections.abc import Sequence

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


def highest_aligned_start(runs: Sequence[tuple[int, int]], length: int, align: int) -> int | None:
    """The highest slot that is a multiple of ``align`` and begins ``length`` free slots, or None.

    HOT grows down from the top while COLD hands out low slots first, so that long runs survive between the two.
    """
    for start, size in reversed(runs):
        candidate = (start + size - length) // align * align
        if candidate >= start:
            return candidate
    return None


class KnownFree:
    """Slots that the host knows to be free without asking the device: a snapshot, and how many went since.

    It relies on an allocator that hands out the slots of the snapshot in ascending order. Then at most the lowest
    ``handed_out`` of them are gone, whatever has been freed in between, and runs above those are free for certain.

    Args:
        runs: maximal runs of the snapshot, as from :func:`runs_of`.
    """

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        self._runs = list(runs)
        self._handed_out = 0

    def hand_out(self, count: int) -> None:
        """Some slots were handed out, from the snapshot or not. Only counted here: this runs at every step."""
        self._handed_out += count

    def _drop_handed_out(self) -> None:
        whole = 0
        while whole < len(self._runs) and self._runs[whole][1] <= self._handed_out:
            self._handed_out -= self._runs[whole][1]
            whole += 1
        del self._runs[:whole]
        if self._runs:
            start, size = self._runs[0]
            self._runs[0] = (start + self._handed_out, size - self._handed_out)
        self._handed_out = 0

    def longest(self, align: int) -> int:
        """Slots in the longest known run from a multiple of ``align`` on; 0 where there is none."""
        self._drop_handed_out()
        return max([0, *(size - (-start % align) for start, size in self._runs)])

    def take_run(self, length: int, align: int) -> int | None:
        """Take the highest aligned run, or None where no run is known to be long enough."""
        self._drop_handed_out()
        start = highest_aligned_start(self._runs, length, align)
        if start is None:
            return None
        place = next(i for i, (first, size) in enumerate(self._runs) if first <= start < first + size)
        first, size = self._runs[place]
        rests = ((first, start - first), (start + length, first + size - start - length))
        self._runs[place : place + 1] = [run for run in rests if run[1]]
        return start
