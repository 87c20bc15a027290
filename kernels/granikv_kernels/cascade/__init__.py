"""What a cascade over paged attention kernels needs around them: slot lists, query rows by item, and the merge."""

from granikv_kernels.cascade.reference import (
    extent_slots_reference,
    gather_rows_reference,
    merge_listed_reference,
    tail_slots_reference,
)

__all__ = ["extent_slots_reference", "gather_rows_reference", "merge_listed_reference", "tail_slots_reference"]
