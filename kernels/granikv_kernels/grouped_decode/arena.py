"""Named int32 arrays in one device buffer, filled by one asynchronous copy from pinned memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

_RING = 4
"""Host copies in flight: plan() may run ahead of the GPU by this many steps before it has to wait for it."""


class Arena:
    """Arrays of fixed size and address; their content changes between graph replays.

    Args:
        sizes: name to number of int32 elements; the last array is the only one uploaded in part.
        device: of the device buffer.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        self._offsets: dict[str, int] = {}
        end = 0
        self._device_arrays: dict[str, tuple[int, int]] = {}
        for name, size in sizes.items():
            self._offsets[name] = end
            self._device_arrays[name] = (end, size)
            # 16-byte alignment lets the compiler use wide loads.
            end += -(-size // 4) * 4
        self._device = torch.zeros(max(end, 4), dtype=torch.int32, device=device)
        self._views = {n: self._device[at : at + max(size, 1)] for n, (at, size) in self._device_arrays.items()}
        self._cuda = device.type == "cuda"
        self._host = [torch.zeros(max(end, 4), dtype=torch.int32, pin_memory=self._cuda) for _ in range(_RING)]
        self._done: list[torch.cuda.Event | None] = [None] * _RING
        self._turn = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    @property
    def bytes(self) -> int:
        """Size of the device buffer."""
        return self._device.numel() * 4

    def upload(self, arrays: Mapping[str, npt.NDArray[np.int32]]) -> None:
        """Copy ``arrays`` (every name, in the order of the sizes) to the device on the current stream."""
        slot = self._turn
        self._turn = (slot + 1) % _RING
        event = self._done[slot]
        if event is not None and not event.query():
            event.synchronize()
        host = self._host[slot].numpy()
        end = 0
        for name, array in arrays.items():
            at, size = self._device_arrays[name]
            if array.size > size:
                raise ValueError(f"{name}: {array.size} entries do not fit into {size}")
            end = at + array.size
            host[at:end] = array
        self._device[:end].copy_(self._host[slot][:end], non_blocking=True)
        if self._cuda:
            event = event or torch.cuda.Event()
            event.record()
            self._done[slot] = event
