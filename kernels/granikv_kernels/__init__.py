"""Attention kernels of GraniKV. A leaf package: imports torch, triton and the standard library only."""
