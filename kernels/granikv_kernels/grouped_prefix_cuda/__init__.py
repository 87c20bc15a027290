"""The grouped prefix pass as a CUDA C++ kernel for Hopper (sm_90a). Importing needs neither nvcc nor a GPU."""

from granikv_kernels.grouped_prefix_cuda.build import CudaBuildError
from granikv_kernels.grouped_prefix_cuda.op import GroupedPrefixCuda, Tails
from granikv_kernels.grouped_prefix_cuda.planner import Grid, Worklist, plan_worklist
from granikv_kernels.grouped_prefix_cuda.variants import DEFAULT, FUSED, TRIALS, Variant

__all__ = [
    "DEFAULT",
    "FUSED",
    "TRIALS",
    "CudaBuildError",
    "Grid",
    "GroupedPrefixCuda",
    "Tails",
    "Variant",
    "Worklist",
    "plan_worklist",
]
