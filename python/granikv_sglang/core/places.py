"""Where this user's files lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_root(env: Mapping[str, str] | None = None) -> Path:
    """The cache folder: $GRANIKV_CACHE, else $XDG_CACHE_HOME/granikv, else ~/.cache/granikv. It may not exist yet."""
    env = os.environ if env is None else env
    if own := env.get("GRANIKV_CACHE"):
        return Path(own).expanduser().absolute()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base).absolute() if base else Path.home() / ".cache") / "granikv"
