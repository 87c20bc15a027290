"""Attention kernels of GraniKV. A leaf package: imports torch, triton, numpy and the standard library only."""
