"""The one progress bar: server start, warm-up and generation, on stderr."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm

_FORMAT = "{desc:<28.28} {percentage:3.0f}% |{bar}| {elapsed}"


class Progress:
    """A bar over all phases. On a terminal its clock moves twice a second; in a log it prints few lines.

    Args:
        total: units of all phases together.
    """

    def __init__(self, total: int) -> None:
        self._live = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            file=sys.stderr,
            bar_format=_FORMAT,
            # Each redraw in a log is a line more.
            mininterval=0.1 if self._live else 15.0,
            ascii=not self._live,
            dynamic_ncols=self._live,
            ncols=None if self._live else 79,
            leave=self._live,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def phase(self, name: str) -> None:
        """Say what is going on now."""
        self._bar.set_description_str(name, refresh=self._live)

    def advance(self, units: int = 1) -> None:
        """Units done; never beyond the total, whatever the caller counted."""
        self._bar.update(max(0, min(units, int(self._bar.total) - self._bar.n)))

    def tick(self) -> None:
        """Called about twice a second by whoever waits: shows that the program is alive."""
        if self._live:
            self._bar.refresh()

    def say(self, text: str) -> None:
        """Print on stdout without tearing the bar."""
        if self._live:
            tqdm.write(text, file=sys.stdout)
        else:
            # No bar to protect, and the line must not wait for a full buffer.
            print(text, flush=True)
