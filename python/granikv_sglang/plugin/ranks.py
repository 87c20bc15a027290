"""Tensor-parallel ranks decide alike without asking each other. This notices when they do not.

Every rank keeps a rolling hash of its decisions and of each answer's tokens. Every :data:`EVERY` passes, and at each
promotion, the ranks exchange it over a gloo group of their own; who sees a difference stops with a message. There is no
collective in between.
A promotion is put to the vote because its copy can fail on one rank alone (memory): then no rank promotes.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from granikv_sglang.core import Counters, GraniKVError
from granikv_sglang.tree.radix import GraniRadixCache

logger = logging.getLogger(__name__)

EVERY = 32
"""Forward passes between two comparisons: an exchange of 32 bytes takes some 100 us, so a few us a pass."""

WAIT_SECONDS = 180.0
"""How long a rank waits for the others before it stops. Longer than any compilation that only one rank does."""

_PASS, _VOTE = 0, 1
_REMEMBERED = 6


class RankCheck:
    """The decisions of this rank, compared with those of all others.

    Args:
        group: a gloo group of all ranks that must decide alike, used for nothing else.
        state: more that must be equal on all ranks, as whole numbers; read at each comparison.
        counters: told of each comparison.
        every: passes between two comparisons, the same on every rank.
    """

    def __init__(
        self, group: Any, state: Callable[[], tuple[int, ...]], counters: Counters, every: int = EVERY
    ) -> None:
        self._group = group
        self._state = state
        self._counters = counters
        self._every = every
        self._hash = hashlib.blake2b(digest_size=8)
        self._passes = 0
        self._last: deque[str] = deque(maxlen=_REMEMBERED)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def note(self, what: str, *numbers: int) -> None:
        """A decision: its kind and everything about it that must be equal on all ranks."""
        self._hash.update(what.encode() + array("q", numbers).tobytes())
        shown = ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
        self._last.append(f"{what}({shown})")

    def passed(self) -> None:
        """One forward pass is about to run. Raises GraniKVError when a comparison is due and the ranks differ."""
        self._passes += 1
        if self._passes % self._every == 0:
            self._exchange(_PASS, True)

    def all_well(self, here: bool) -> bool:
        """Whether every rank's part of a promotion went well. Raises GraniKVError where another rank promotes not."""
        return self._exchange(_VOTE, here)

    def _exchange(self, kind: int, well: bool) -> bool:
        digest = self._hash.copy()
        digest.update(array("q", self._state()).tobytes())
        signed = int.from_bytes(digest.digest(), "little", signed=True)
        mine = torch.tensor([kind, self._passes, signed, int(well)], dtype=torch.int64)
        all_of_them = [torch.empty_like(mine) for _ in range(self._size)]
        try:
            dist.all_gather(all_of_them, mine, group=self._group)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise self._stop(f"no answer from another rank ({reason}): it has ended or is somewhere else") from error
        rows = torch.stack(all_of_them)
        other = torch.nonzero((rows[:, :3] != mine[:3]).any(dim=1)).flatten().tolist()
        if other:
            theirs = rows[other[0]].tolist()
            at = {_PASS: "a comparison", _VOTE: "a promotion"}
            raise self._stop(
                f"rank {other[0]} is at {at[theirs[0]]} after {theirs[1]} passes with hash {_hex(theirs[2])}, "
                f"this rank at {at[kind]} after {self._passes} passes with hash {_hex(signed)}"
            )
        self._counters.rank_comparisons += 1
        return bool(rows[:, 3].all())

    def _stop(self, difference: str) -> GraniKVError:
        message = (
            f"tensor-parallel ranks no longer decide alike, so rank {self._rank} stops: {difference}. Last decisions "
            f"here: {'; '.join(self._last) or 'none'}. Report this with every rank's log; --granikv-off serves without"
        )
        logger.error("GraniKV: %s", message)
        return GraniKVError(message)


def rank_state(tree: GraniRadixCache) -> tuple[int, ...]:
    """What must be equal on all tensor-parallel ranks, besides the decisions themselves."""
    c = tree.counters
    return (
        tree.allocator.available_size(),
        tree.evictable_size(),
        tree.protected_size(),
        *(c.promotions, c.promoted_tokens, c.hot_splits, c.hot_evictions, c.hot_evicted_tokens, c.room_evictions),
        *(number for _, span in tree.extents() for number in (span.start, span.length)),
    )


def _hex(signed: int) -> str:
    return f"{signed & (1 << 64) - 1:016x}"


def group_like(group: Any, wait_seconds: float = WAIT_SECONDS) -> Any:
    """A new gloo group of the ranks of ``group``, with a timeout of its own. Every rank of it must call this."""
    return dist.new_group(
        ranks=dist.get_process_group_ranks(group),
        backend="gloo",
        timeout=timedelta(seconds=wait_seconds),
        use_local_synchronization=True,
    )
