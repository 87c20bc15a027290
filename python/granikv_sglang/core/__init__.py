"""Plain values every other package may use: names of regimes and reasons, spans of slots, errors, counters."""

from granikv_sglang.core.commit import commit
from granikv_sglang.core.counters import Counters
from granikv_sglang.core.describe import descriptions
from granikv_sglang.core.errors import AuditError, GraniKVError
from granikv_sglang.core.faults import Breaker
from granikv_sglang.core.places import cache_root
from granikv_sglang.core.types import Bound, Decline, Reason, Regime, Span

__all__ = [
    "AuditError",
    "Bound",
    "Breaker",
    "Counters",
    "Decline",
    "GraniKVError",
    "Reason",
    "Regime",
    "Span",
    "cache_root",
    "commit",
    "descriptions",
]
