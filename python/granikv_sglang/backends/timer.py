"""Times one attention layer of passes as they are served: two clock reads on a CPU, two events in each CUDA graph."""

from __future__ import annotations

import logging
import time
from typing import Protocol

import torch

from granikv_sglang.core import Regime

logger = logging.getLogger(__name__)

Key = tuple[Regime, int]
"""Regime and rows, padding included: what has a graph of its own."""


class LayerTimer(Protocol):
    """``start`` and ``stop`` stand around one layer of every pass; ``read`` never waits for the device."""

    layer: int

    def start(self, key: Key) -> None: ...

    def stop(self, key: Key) -> None: ...

    def read(self, key: Key) -> float | None:
        """Microseconds of the layer in a recent pass of that kind; None where none is finished."""
        ...


class HostTimer:
    """For engines that compute before they return."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._began = 0.0
        self._last: tuple[Key, float] | None = None

    def start(self, key: Key) -> None:
        self._began = time.perf_counter()

    def stop(self, key: Key) -> None:
        self._last = (key, (time.perf_counter() - self._began) * 1e6)

    def read(self, key: Key) -> float | None:
        return self._last[1] if self._last is not None and self._last[0] == key else None


class EventTimer:
    """Two CUDA events a graph, recorded as nodes of it: each replay stamps them anew, and the host launches nothing.

    ``start`` and ``stop`` run where Python runs the layer: in captures, and in passes without a graph.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._pairs: dict[Key, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def start(self, key: Key) -> None:
        if key not in self._pairs:
            # External: in a capture it becomes a node of the graph and not a dependency inside it.
            begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
            self._pairs[key] = (begin, end)
        self._pairs[key][0].record()

    def stop(self, key: Key) -> None:
        self._pairs[key][1].record()

    def read(self, key: Key) -> float | None:
        pair = self._pairs.get(key)
        if pair is None or not (pair[0].query() and pair[1].query()):
            return None
        us = pair[0].elapsed_time(pair[1]) * 1e3
        # A replay in flight has stamped the first event and not yet the second: look again later.
        return us if us > 0 else None


def events_work_in_graphs() -> bool:
    """Whether this GPU's driver and torch time events that are nodes of a graph: tried on a graph of one addition.

    A server must not fail to capture its graphs for the sake of a metric.
    """
    timer, key = EventTimer(0), (Regime.UNIFORM, 0)
    try:
        number = torch.zeros(1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            timer.start(key)
            number.add_(1)
            timer.stop(key)
        graph.replay()
        torch.cuda.synchronize()
        return timer.read(key) is not None
    except RuntimeError as error:
        logger.warning("GraniKV: attention is not timed while serving, CUDA says: %s", str(error).splitlines()[0])
        return False
