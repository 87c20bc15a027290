"""One decode-attention layer of a batch with shared prefixes: prefix pass, tail pass, merge."""

from granikv_kernels.grouped_decode.config import (
    KernelConfig,
    PrefixTile,
    TailTile,
    default_config,
    small_config,
)
from granikv_kernels.grouped_decode.op import GroupedDecode
from granikv_kernels.grouped_decode.reference import grouped_decode_reference

__all__ = [
    "GroupedDecode",
    "KernelConfig",
    "PrefixTile",
    "TailTile",
    "default_config",
    "grouped_decode_reference",
    "small_config",
]
