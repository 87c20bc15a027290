"""Errors a person is meant to read: one line that says what is wrong and how to mend it."""

from __future__ import annotations


class GraniKVError(Exception):
    """A refusal. ``str(error)`` is one line, names the flag or piece at fault and the mend; callers print it bare."""


class AuditError(AssertionError):
    """Slot conservation does not hold. Never expected; carries the first discrepancy found."""
