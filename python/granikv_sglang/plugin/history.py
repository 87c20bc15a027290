"""The last two minutes of a scheduler process, second by second, and its last decisions. For people; decides nothing.

The clock here is the wall clock, read once a pass. Nothing that plans or promotes may look at it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from granikv_sglang.core import Regime
from granikv_sglang.plan import Plan

SECONDS = 120
DECISIONS = 24


@dataclass
class _Second:
    second: int
    passes: Counter[Regime] = field(default_factory=Counter)
    bytes_not_reread: int = 0


@dataclass
class _Run:
    """Passes in a row with the same regime and reason."""

    plan: Plan
    rows: int
    first: float
    last: float
    passes: int = 1


class History:
    """Notes every forward pass. Bounded: :data:`SECONDS` seconds and :data:`DECISIONS` runs of equal decisions.

    Args:
        now: seconds since the epoch.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._seconds: deque[_Second] = deque(maxlen=SECONDS)
        self._runs: deque[_Run] = deque(maxlen=DECISIONS)
        self._bytes = 0
        self.started = now()

    def note(self, plan: Plan, rows: int, bytes_not_reread: int) -> None:
        """One pass of ``rows`` requests; ``bytes_not_reread`` is the process's counter after it."""
        now = self._now()
        if not self._seconds or self._seconds[-1].second != int(now):
            self._seconds.append(_Second(int(now)))
        current = self._seconds[-1]
        current.passes[plan.decision.regime] += 1
        current.bytes_not_reread += bytes_not_reread - self._bytes
        self._bytes = bytes_not_reread
        last = self._runs[-1] if self._runs else None
        if last is not None and last.plan.decision == plan.decision:
            last.plan, last.rows, last.last, last.passes = plan, rows, now, last.passes + 1
        else:
            self._runs.append(_Run(plan, rows, now, now))

    def seconds(self) -> list[dict[str, Any]]:
        """Passes by regime and bytes not read again, one entry per second in which anything ran, oldest first."""
        return [
            {
                "second": entry.second,
                "passes": {regime.value: entry.passes[regime] for regime in Regime},
                "bytes_not_reread": entry.bytes_not_reread,
            }
            for entry in self._seconds
        ]

    def decisions(self) -> list[dict[str, Any]]:
        """Runs of equal decisions, newest first; rows and stretches are those of a run's last pass."""
        return [
            {
                "first": round(run.first, 3),
                "last": round(run.last, 3),
                "regime": run.plan.decision.regime.value,
                "reason": run.plan.decision.reason.value,
                "passes": run.passes,
                "requests": run.rows,
                "stretches": len(run.plan.items),
                "tokens_read_once": sum(item.tokens for item in run.plan.items),
            }
            for run in reversed(self._runs)
        ]
