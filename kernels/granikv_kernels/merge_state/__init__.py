"""Exact merge of attention states by log-sum-exp."""

from granikv_kernels.merge_state.reference import merge_states_reference

__all__ = ["merge_states_reference"]
