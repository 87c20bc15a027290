"""Engines for shared decode and for prefill over HOT prefixes, by name.

The SGLang adapter that wraps a stock backend is ``backends.attention``.
"""

from __future__ import annotations

from granikv_sglang.backends.base import DecodeBatch, ExtendBatch, Geometry, PrefixExtend, SharedDecode
from granikv_sglang.backends.cascade_plan import cascade_takes
from granikv_sglang.backends.extend_torch import TorchExtend
from granikv_sglang.backends.reference import TorchSharedDecode

__all__ = [
    "CUDA_ENGINES",
    "ENGINES",
    "EXTENDS",
    "DecodeBatch",
    "ExtendBatch",
    "Geometry",
    "PrefixExtend",
    "SharedDecode",
    "TorchExtend",
    "TorchSharedDecode",
    "build_engine",
    "build_extend",
    "cascade_takes",
]

ENGINES = ("torch", "triton")
"""Engines that any machine runs, Triton's interpreter included."""
CUDA_ENGINES = ("cascade",)
"""Engines that need an NVIDIA GPU."""
EXTENDS = ("torch", "flashinfer")


def build_engine(
    name: str, geometry: Geometry | None = None, max_rows: int = 0, slots: int = 0, paged: bool = False
) -> SharedDecode:
    """The engine called ``name``. KeyError if unknown.

    All but ``torch`` need the attention shapes and the largest batch; ``cascade`` also the slots of the KV pool; it
    alone takes ``paged`` plans, whose items are token positions of their first row and not slots.
    """
    if name == "torch":
        return TorchSharedDecode()
    if name == "triton" and geometry is not None:
        # Triton is imported where it runs: a CPU server has no use for it.
        from granikv_sglang.backends.triton import TritonSharedDecode  # noqa: PLC0415

        return TritonSharedDecode(geometry, max_rows)
    if name == "cascade" and geometry is not None:
        # Imports CUDA libraries: a CPU server has no use for it.
        from granikv_sglang.backends.cascade import CascadeSharedDecode  # noqa: PLC0415

        return CascadeSharedDecode(geometry, max_rows, slots, paged)
    raise KeyError(name)


def build_extend(name: str, geometry: Geometry) -> PrefixExtend:
    """The prefill engine called ``name``. KeyError if unknown."""
    if name == "torch":
        return TorchExtend()
    if name == "flashinfer":
        # Imports CUDA libraries: a CPU server has no use for it.
        from granikv_sglang.backends.extend_flashinfer import FlashInferExtend  # noqa: PLC0415

        return FlashInferExtend(geometry)
    raise KeyError(name)
