"""Runs one helper process: its lines of progress handed on, its last words kept for an error message."""

from __future__ import annotations

import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

_POLL_SECONDS = 0.5
# What uv draws before the lines of an error: spaces, box drawing, a multiplication sign, an arrow.
_DECORATION = " \t\u2502\u251c\u2570\u2500\u25b6\u00d7"


class ProcessFailed(Exception):
    """A helper ended with an error or took too long. The message is one line."""


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    keep_open: int,
    timeout_seconds: float,
    on_line: Callable[[str], None],
    on_wait: Callable[[], None],
) -> None:
    """Run `argv`; call `on_line` with each line of its stdout, and `on_wait` about twice a second meanwhile.

    `keep_open` is the file descriptor of the lock. The child inherits it, so that if this process is killed the lock
    stays held until the child, which still writes, has ended too. Raises ProcessFailed.
    """
    deadline = time.monotonic() + timeout_seconds
    with tempfile.TemporaryFile() as errors:
        try:
            # Unbuffered: select() must see every line that has not been read yet.
            child = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                pass_fds=(keep_open,),
            )
        except OSError as error:
            raise ProcessFailed(f"cannot start {argv[0]}: {error}") from error
        with child:
            try:
                _follow(child, deadline, timeout_seconds, on_line, on_wait)
            finally:
                child.kill()
        if child.returncode:
            errors.seek(0)
            raise ProcessFailed(_essence(errors.read().decode(errors="replace")) or f"exit status {child.returncode}")


def _follow(
    child: subprocess.Popen[bytes],
    deadline: float,
    timeout_seconds: float,
    on_line: Callable[[str], None],
    on_wait: Callable[[], None],
) -> None:
    assert child.stdout is not None
    while True:
        if time.monotonic() > deadline:
            raise ProcessFailed(f"no result after {timeout_seconds:.0f} s")
        ready, _, _ = select.select([child.stdout], [], [], _POLL_SECONDS)
        if not ready:
            on_wait()
        elif line := child.stdout.readline():
            on_line(line.decode(errors="replace").rstrip())
        else:
            child.wait()
            return


def _essence(text: str) -> str:
    """One line out of an installer's or a traceback's output: the error, and the deepest cause it names."""
    lines = [line.lstrip(_DECORATION).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.lower().startswith(("hint:", "warning:"))]
    heads = [line for line in lines if line.lower().startswith("error")][:1]
    return ": ".join(dict.fromkeys(heads + lines[-1:])).rstrip(".")
