"""A piece that may fail without harm, since something slower does its work: its faults are counted, and it is given up.

The first fault is logged in full, the others are counted; after :data:`LIMIT` the piece is switched off with a message.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

LIMIT = 3
"""Faults after which a piece is switched off for the life of the process."""


class Breaker:
    """Counts the faults of one piece.

    Args:
        what: the piece, in a message: ``regime cascade``.
        instead: what does its work then: ``such passes run UNIFORM``.
        limit: faults after which it is off.
    """

    def __init__(self, what: str, instead: str, limit: int = LIMIT) -> None:
        self.what = what
        self.faults = 0
        self.off = False
        self._instead = instead
        self._limit = limit

    def fault(self, error: BaseException) -> None:
        """Note one fault that has been made good."""
        self.faults += 1
        if self.faults == 1:
            logger.error(
                "GraniKV: a fault in %s (%s: %s); %s. Later ones are counted, not logged",
                *(self.what, type(error).__name__, error, self._instead),
                exc_info=error,
            )
        if self.faults >= self._limit:
            self.switch_off(f"{self.faults} faults")

    def switch_off(self, why: str) -> None:
        """Give the piece up; says so once."""
        if not self.off:
            self.off = True
            logger.error(
                "GraniKV: %s is switched off (%s): %s until the server restarts", self.what, why, self._instead
            )
