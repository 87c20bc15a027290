"""Decode attention over each request's private, token-level tail."""

from granikv_kernels.tail_attention.reference import tail_attention_reference

__all__ = ["tail_attention_reference"]
