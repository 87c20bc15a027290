"""The one progress bar: server start, warm-up and generation, on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

_FORMAT = "{desc:<28.28} {percentage:3.0f}% |{bar}| {elapsed}"
_LOG_EVERY_SECONDS = 20.0


class Progress:
    """A bar over all phases, its clock moving on a terminal; in a log, a line now and then instead of redraws.

    Args:
        total: units of all phases together.
    """

    def __init__(self, total: int) -> None:
        self._live = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            file=sys.stderr,
            bar_format=_FORMAT,
            mininterval=0.1,
            dynamic_ncols=True,
            disable=not self._live,
        )
        self._total, self._done, self._name = total, 0, ""
        self._begin = time.monotonic()
        self._logged = self._begin - _LOG_EVERY_SECONDS

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def phase(self, name: str) -> None:
        """Say what is going on now."""
        self._name = name
        self._bar.set_description_str(name)
        self.tick()

    def advance(self, units: int = 1) -> None:
        """Units done; never beyond the total, whatever the caller counted."""
        units = max(0, min(units, self._total - self._done))
        self._done += units
        self._bar.update(units)

    def finish(self) -> None:
        """All is done."""
        self.advance(self._total)

    def tick(self) -> None:
        """Called about twice a second by whoever waits: shows that the program is alive."""
        if self._live:
            self._bar.refresh()
            return
        now = time.monotonic()
        if now - self._logged >= _LOG_EVERY_SECONDS:
            self._logged = now
            percent = 100 * self._done // self._total
            print(f"[{now - self._begin:3.0f} s] {percent:3d}% {self._name}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print on stdout without tearing the bar."""
        if self._live and sys.stdout.isatty():
            tqdm.write(text, file=sys.stdout)
        else:
            # No bar in the way, and the line must not wait for a full buffer.
            print(text, flush=True)
