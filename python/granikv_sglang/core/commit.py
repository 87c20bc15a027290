"""Which commit a number was measured at."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def commit() -> str:
    """The commit of this source tree, with ``+`` where files differ from it.

    A copy without history may be told in GRANIKV_COMMIT; ``unknown`` where there is neither.
    """
    told = os.environ.get("GRANIKV_COMMIT", "")
    if told or not shutil.which("git"):
        return told or "unknown"
    head = _git("rev-parse", "--short", "HEAD")
    return head + ("+" if _git("status", "--porcelain", "-uno") else "") if head else "unknown"


def _git(*args: str) -> str:
    """What git says of this tree; empty where it is no checkout."""
    done = subprocess.run(["git", "-C", str(Path(__file__).parent), *args], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
