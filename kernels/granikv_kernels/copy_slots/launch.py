"""Launch of the promotion copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from granikv_kernels.copy_slots.kernel import copy_kernel
from granikv_kernels.interpret import launch, next_power_of_2

_TILE_WORDS = 4096
"""4-byte words per program: 16 KiB, so that each thread has eight 16-byte loads in flight."""


class SlotCopier:
    """Copies slots of every layer's K and V buffer in one launch.

    Args:
        buffers: ``[slots, ...]`` each, contiguous, of one row size (a multiple of 16 bytes) and one device. Held, since
            the kernel knows them by address.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        if not buffers:
            raise ValueError("no buffers to copy within")
        self._buffers = tuple(buffers)
        rows = {b[0].numel() * b.element_size() for b in buffers}
        if len(rows) != 1:
            raise ValueError(f"buffers have different row sizes: {sorted(rows)} bytes")
        self.row_bytes = rows.pop()
        if self.row_bytes % 16 or any(b.data_ptr() % 16 or not b.is_contiguous() for b in buffers):
            raise ValueError("buffers must be contiguous and aligned, and their rows multiples of, 16 bytes")
        self._table = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64, device=buffers[0].device)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """``buffer[destination] = buffer[source]`` in every buffer, on the current stream.

        Args:
            source, destination: int32 or int64 ``[n]`` on the buffers' device; disjoint sets, no destination twice.
        """
        count = source.shape[0]
        if destination.shape != source.shape:
            raise ValueError(f"{count} sources for {destination.shape[0]} destinations")
        if count == 0:
            return
        words = self.row_bytes // 4
        block_w = next_power_of_2(words)
        block_t = max(1, _TILE_WORDS // block_w)
        launch(
            copy_kernel, (-(-count // block_t), len(self._buffers)),
            self._table, source, destination, count,
            ROW_WORDS=words, BLOCK_W=block_w, BLOCK_T=block_t, num_warps=4,
        )  # fmt: skip


def copy_slots(buffers: Sequence[torch.Tensor], source: torch.Tensor, destination: torch.Tensor) -> None:
    """One-off :class:`SlotCopier`; arguments as in :func:`copy_slots_reference`."""
    SlotCopier(buffers).copy(source, destination)
