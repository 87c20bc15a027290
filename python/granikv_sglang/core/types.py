"""Names and small values shared by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Regime(StrEnum):
    """How one forward pass computes attention (design section 6)."""

    UNIFORM = "uniform"
    """SGLang's stock backend: every request reads its whole context."""
    CASCADE = "cascade"
    """Each shared prefix is read once for all its requests; reading it is what the pass costs."""
    BATCHED_GEMM = "batched_gemm"
    """Each shared prefix is read once for all its requests, as one large product; computing is what the pass costs."""


class Reason(StrEnum):
    """Why a forward pass got its regime. The value is the label in metrics."""

    NOT_DECODE = "not_decode"
    """Mixed or idle pass, or a prefill that finds nothing HOT: the stock backend does those."""
    NOTHING_SHARED = "nothing_shared"
    """No HOT prefix has two or more members in this batch."""
    TOO_SMALL = "too_small"
    """A HOT prefix is there, but what it saves does not pay for the extra launches."""
    OVER_CAPACITY = "over_capacity"
    """More rows than the engine's fixed buffers hold, or no shared stretch that they do."""
    ENGINE_OFF = "engine_off"
    """The engine of the regime that was chosen has failed too often and is switched off."""
    FORCED = "forced"
    """``--granikv-regime`` names this regime."""
    MEMORY_BOUND = "memory_bound"
    """Few query rows per prefix: reading the prefix is the cost."""
    COMPUTE_BOUND = "compute_bound"
    """Many query rows per prefix: the matrix units are the cost."""
    COMMUNICATION_BOUND = "communication_bound"
    """Tensor parallel: the all-reduce costs more than attention, and sharing still gains enough of the whole."""
    LAUNCH_BOUND = "launch_bound"
    """So little to read that launches and merges are the cost, and sharing is still faster."""
    NEAR_TIE = "near_tie"
    """Another regime is predicted to be hardly faster: the one of the passes before stays, so that they do not flap."""
    HOT_PREFILL = "hot_prefill"
    """Prefill whose cached prefix is HOT: read as dense stretches, once for all requests of the pass."""


class Bound(StrEnum):
    """What a decode pass's attention is predicted to wait for most. The value is the label in metrics."""

    NONE = "none"
    """Nothing was predicted: no decode pass, nothing shared, or over capacity."""
    MEMORY = "memory"
    """Reading K and V."""
    COMPUTE = "compute"
    """The matrix units."""
    LAUNCH = "launch"
    """Fixed costs: launches, merges, work per request."""
    COMMUNICATION = "communication"
    """The all-reduce between tensor-parallel ranks."""


class Decline(StrEnum):
    """Why a shared prefix was not promoted to HOT. The value is the label in metrics."""

    TOO_SHORT = "too_short"
    """The root path, or what is still COLD of it, is shorter than ``--granikv-min-tokens`` asks for."""
    FEW_SHARERS = "few_sharers"
    """Fewer live requests than ``--granikv-min-sharers`` hold it."""
    NO_SAVING = "no_saving"
    """The reads saved in the steps that remain do not pay for the copy."""
    NO_ROOM = "no_room"
    """No contiguous run is free for even a quarter of it, and evicting unlocked leaves cannot make one."""
    COPY_FAILED = "copy_failed"
    """The copy raised, on this rank or another; the prefix stays COLD and is served as before."""
    SWITCHED_OFF = "switched_off"
    """Copies have failed too often; nothing is promoted any more."""


@dataclass(frozen=True, slots=True)
class Span:
    """A contiguous run of slots, ``[start, start + length)``, in global slot ids."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    def split(self, at: int) -> tuple[Span, Span]:
        """The first ``at`` slots and the rest; 0 < at < length."""
        if not 0 < at < self.length:
            raise ValueError(f"cannot split a span of {self.length} slots at {at}")
        return Span(self.start, at), Span(self.start + at, self.length - at)
