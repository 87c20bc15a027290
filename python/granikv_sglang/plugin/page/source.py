"""Where the page's numbers come from: the scheduler's state, asked for at most twice a second by all viewers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from granikv_sglang.config import NAME
from granikv_sglang.core import Decline, Reason, Regime, descriptions
from granikv_sglang.plugin.page.schema import PageState

FRESH_S = 0.5
"""A state this young is shown again instead of asking the scheduler."""
PATIENCE_S = 2.0
"""How long a viewer waits for a scheduler in the middle of a long pass before getting the last state with its age."""
FIRST_PATIENCE_S = 30.0

InternalState = Callable[[], Awaitable[list[Mapping[str, Any]]]]


class NoState(Exception):
    """There is nothing to show; the text says why."""


class StateSource:
    """One question to the scheduler at a time, shared by everybody who asks meanwhile.

    Args:
        internal_state: asks the schedulers; the first answer is used.
        model: name shown.
        now: seconds since the epoch.
    """

    def __init__(self, internal_state: InternalState, model: str, now: Callable[[], float] = time.time) -> None:
        self._internal_state = internal_state
        self._model = model
        self._now = now
        self._words = {code: text for cls in (Regime, Reason, Decline) for code, text in descriptions(cls).items()}
        self._last: PageState | None = None
        self._task: asyncio.Task[None] | None = None

    async def state(self) -> PageState:
        """The present state, or the last one with its age. Raises NoState."""
        if self._last is None or self._now() - self._last.now > FRESH_S:
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._refresh())
            patience = FIRST_PATIENCE_S if self._last is None else PATIENCE_S
            done, _ = await asyncio.wait({self._task}, timeout=patience)
            if done:
                self._task.result()
        if self._last is None:
            raise NoState(f"the scheduler has not answered for {FIRST_PATIENCE_S:.0f} s")
        return self._last.model_copy(update={"age_s": round(max(0.0, self._now() - self._last.now), 3)})

    async def _refresh(self) -> None:
        states = await self._internal_state()
        ours = states[0].get(NAME)
        if ours is None:
            raise NoState("the scheduler's state has no part of GraniKV")
        self._last = self._page_state(ours)

    def _page_state(self, ours: Mapping[str, Any]) -> PageState:
        live, counters, pool = ours["live"], ours["counters"], ours["pool"]
        return PageState.model_validate(
            {
                "version": ours["version"],
                "model": self._model,
                "stock_backend": ours["stock_backend"],
                "started": live["started"],
                "now": self._now(),
                "age_s": 0.0,
                "show_text": ours["options"]["show_text"],
                "requests": live["requests"],
                "pool": {**pool, "hot": ours["hot_tokens"]},
                "forest": live["forest"],
                "slot_map": live["map"],
                "seconds": live["seconds"],
                "decisions": live["decisions"],
                "counters": {key: value for key, value in counters.items() if isinstance(value, int)},
                "passes": counters["steps"],
                "declines": counters["declines"],
                "words": self._words,
            }
        )
