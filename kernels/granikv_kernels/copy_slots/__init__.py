"""Move K and V rows between slots, all layers."""

from granikv_kernels.copy_slots.reference import copy_slots_reference

__all__ = ["copy_slots_reference"]
