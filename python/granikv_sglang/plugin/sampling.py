"""Predicted against measured time of attention, sampled while serving. For metrics; decides nothing."""

from __future__ import annotations

from collections.abc import Callable

from granikv_sglang.backends.timer import Key, LayerTimer
from granikv_sglang.core import Counters
from granikv_sglang.plan import Plan

EVERY = 128
"""Decode passes from one sample to the next."""
SETTLED = 4
"""Decode passes that a plan must have stood: whichever of them the device has timed last was one of this plan."""


class Sampler:
    """Reads the layer timer once in :data:`EVERY` decode passes; costs a comparison in the others.

    A pass in flight has not stamped its second event: then the next pass asks again. Nothing ever waits.

    Args:
        timer: around one layer of every pass.
        timed: what the last decode pass was, as the attention backend saw it.
    """

    def __init__(self, timer: LayerTimer, timed: Callable[[], Key | None], counters: Counters) -> None:
        self._timer = timer
        self._timed = timed
        self._counters = counters
        self._version: int | None = None
        self._stood = 0
        self._since = 0

    def before(self, plan: Plan, predicted_us: Callable[[], float]) -> None:
        """Called before a decode pass is launched; the timer holds passes before it.

        ``predicted_us`` gives the time of one layer under ``plan``, with the tails of now.
        """
        self._since += 1
        if plan.version != self._version:
            self._version, self._stood = plan.version, 0
        else:
            self._stood += 1
        if self._since < EVERY or self._stood < SETTLED:
            return
        key = self._timed()
        # A pass that did not run as planned (a batch that was split, a graph of another kind) is not compared.
        us = self._timer.read(key) if key is not None and key[0] is plan.decision.regime else None
        if us is None:
            return
        self._since = 0
        regime = plan.decision.regime
        self._counters.sampled[regime] += 1
        self._counters.predicted_ns[regime] += round(predicted_us() * 1e3)
        self._counters.measured_ns[regime] += round(us * 1e3)
