"""Engines for shared decode, by name. The SGLang adapter that wraps a stock backend is ``backends.attention``."""

from __future__ import annotations

from granikv_sglang.backends.base import SharedDecode
from granikv_sglang.backends.reference import TorchSharedDecode

__all__ = ["SharedDecode", "TorchSharedDecode", "build_engine"]


def build_engine(name: str) -> SharedDecode:
    """The engine called ``name`` (``torch``). Raises KeyError for an unknown name."""
    return {"torch": TorchSharedDecode}[name]()
