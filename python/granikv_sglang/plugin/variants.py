"""CUDA graph variants: per batch size SGLang's own graph and one for each shared regime, and what those cost."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from granikv_sglang.backends import SharedDecode
from granikv_sglang.config import NAME
from granikv_sglang.core import Reason, Regime
from granikv_sglang.plan import Decision, Plan

logger = logging.getLogger(__name__)


def label_of(regime: Regime, variant: str = "") -> str:
    """SGLang's ``variant_label`` of the graphs of a shared regime; stock graphs keep SGLang's own."""
    return f"{NAME}-{regime.value}" + (f"-{variant}" if variant else "")


def device_free_bytes() -> int:
    """Free memory of the current CUDA device, caches of this process not counted; 0 where there is none."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


class GraphVariants:
    """Captures the variants of every engine that is safe in graphs and adds up what that took.

    Args:
        engines: the engine of each shared regime; regimes that share one engine still get a graph each.
        free_bytes: free device memory now.
        give_up: told that a regime's graph could not be captured; none of its graphs is captured then. None lets the
            error through.
    """

    def __init__(
        self,
        engines: Mapping[Regime, SharedDecode],
        free_bytes: Callable[[], int] = device_free_bytes,
        give_up: Callable[[Regime, Exception], None] | None = None,
    ) -> None:
        self._variants = {regime: engine.variants for regime, engine in engines.items() if engine.graph_safe}
        self._free_bytes = free_bytes
        self._give_up = give_up
        self._version = 0
        self._captured: Counter[Regime] = Counter()
        self._seconds = 0.0
        self._bytes = 0

    def capture(self, size: int, hold: Callable[[Plan | None], None], capture_one: Callable[[str], Any]) -> None:
        """Capture every variant of one batch size.

        Args:
            size: rows of the graph.
            hold: makes a plan the one of the forward in flight; called with None at the end, also after an error.
            capture_one: records the graph of the plan held, under a label.
        """
        for regime, variants in list(self._variants.items()):
            for variant in variants:
                if not self._capture_one(regime, variant, size, hold, capture_one):
                    del self._variants[regime]
                    break

    def _capture_one(
        self,
        regime: Regime,
        variant: str,
        size: int,
        hold: Callable[[Plan | None], None],
        capture_one: Callable[[str], Any],
    ) -> bool:
        """False where it failed and its regime was given up."""
        self._version -= 1  # never equal to a planner's version, so the engine plans afresh
        plan = Plan(Decision(regime, Reason.FORCED), (), np.zeros(size, dtype=np.int32), self._version, variant)
        free, begin = self._free_bytes(), time.perf_counter()
        hold(plan)
        try:
            capture_one(label_of(regime, variant))
        except Exception as error:
            if self._give_up is None:
                raise
            self._give_up(regime, error)
            return False
        finally:
            hold(None)
        self._captured[regime] += 1
        self._seconds += time.perf_counter() - begin
        self._bytes += max(0, free - self._free_bytes())
        return True

    def cost(self) -> dict[str, Any]:
        """``captured`` graphs by regime, and the ``seconds`` and ``mib`` of device memory they added to the start."""
        return {
            "captured": {regime.value: count for regime, count in self._captured.items()},
            "seconds": round(self._seconds, 2),
            "mib": round(self._bytes / (1 << 20), 1),
        }

    def report(self) -> None:
        """Log one line, where anything was captured."""
        if self._captured:
            cost = self.cost()
            counts = ", ".join(f"{count} {regime}" for regime, count in cost["captured"].items())
            logger.info(
                "GraniKV captured %d graph variants (%s): %.1f s and %.0f MiB added to the start",
                sum(self._captured.values()),
                counts,
                cost["seconds"],
                cost["mib"],
            )
