"""HOT runs and COLD slots in SGLang's one index space."""

from granikv_sglang.pools.runs import KnownFree, highest_aligned_start, runs_of

__all__ = ["KnownFree", "highest_aligned_start", "runs_of"]
