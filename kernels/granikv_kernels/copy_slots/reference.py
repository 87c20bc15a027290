"""Pure-torch reference of the promotion copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_slots_reference(buffers: Sequence[torch.Tensor], source: torch.Tensor, destination: torch.Tensor) -> None:
    """``buffer[destination] = buffer[source]`` for every layer's K and V buffer.

    Args:
        buffers: ``[slots, ...]`` each.
        source, destination: int64 ``[n]``; the two sets are disjoint, so the order of writes does not matter.
    """
    for buffer in buffers:
        buffer[destination] = buffer[source]
