"""Many queries against contiguous shared prefixes, each prefix read once."""

from granikv_kernels.grouped_prefix.reference import grouped_prefix_attention_reference

__all__ = ["grouped_prefix_attention_reference"]
