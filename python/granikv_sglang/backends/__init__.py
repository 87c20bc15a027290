"""Engines for shared decode, by name. The SGLang adapter that wraps a stock backend is ``backends.attention``."""

from __future__ import annotations

from granikv_sglang.backends.base import DecodeBatch, Geometry, SharedDecode
from granikv_sglang.backends.reference import TorchSharedDecode

__all__ = ["ENGINES", "DecodeBatch", "Geometry", "SharedDecode", "TorchSharedDecode", "build_engine"]

ENGINES = ("torch", "triton")


def build_engine(name: str, geometry: Geometry | None = None, max_rows: int = 0) -> SharedDecode:
    """The engine called ``name``; ``triton`` needs the attention shapes and the largest batch. KeyError if unknown."""
    if name == "torch":
        return TorchSharedDecode()
    if name == "triton" and geometry is not None:
        # Triton is imported where it runs: a CPU server has no use for it.
        from granikv_sglang.backends.triton import TritonSharedDecode  # noqa: PLC0415

        return TritonSharedDecode(geometry, max_rows)
    raise KeyError(name)
