"""The CPU platform plug-in: makes ``--device cpu`` work in SGLang without AMX and without vLLM.

Entry point of group ``sglang.srt.platforms``. It activates only on a machine without a GPU, so that an NVIDIA host
keeps SGLang's own platform. Upstream contract: ``sglang.srt.platforms.interface.SRTPlatform``.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

# SGLang resolves the platform while its own packages are half imported: anything from sglang.srt.mem_cache at module
# level here would be a circular import, so those two classes are imported where they are used.
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum


def activate() -> str | None:
    """Return the platform class's path, or None where an accelerator is present (then SGLang picks its own)."""
    if torch.cuda.is_available() or torch.xpu.is_available():
        return None
    return "granikv_sglang.plugin.platform.GraniCpuPlatform"


def build_stock_allocator(size: int, *, page_size: int, **kwargs: Any) -> Any:
    """The allocator stock SGLang uses for ``page_size``, behind the call shape of an out-of-tree platform.

    Upstream asks a platform for one paged class whatever the page size; in tree it takes the token-level one at page
    size 1. ``size`` is in tokens.
    """
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator  # noqa: PLC0415

    if page_size == 1:
        return TokenToKVPoolAllocator(size, **kwargs)
    return PagedTokenToKVPoolAllocator(size, page_size=page_size, **kwargs)


class GraniCpuPlatform(CpuSRTPlatform):
    """SGLang's CPU platform, presented as out-of-tree: torch-native code paths are taken on any x86 or Arm CPU."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: PLC0415

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> Any:
        # GraniKV's own allocator comes in through the hook on _build_token_to_kv_pool_allocator, the same seam as on
        # CUDA.
        return build_stock_allocator

    def get_dispatch_key_name(self) -> str:
        return "native"

    # ``/start_profile`` asks an out-of-tree platform for these, and what it does not get ends the scheduler.
    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang.srt.model_executor.cuda_graph_config import Backend  # noqa: PLC0415
        from sglang.srt.utils.common import cpu_has_amx_support  # noqa: PLC0415

        # Upstream's auto makes float16 even of a float32 checkpoint; without AMX a CPU computes that many times slower.
        if server_args.dtype == "auto" and not cpu_has_amx_support():
            server_args.dtype = "float32"
        # Upstream's x86 default needs AMX; without it that backend's kernels do not exist.
        if server_args.attention_backend == "intel_amx" and not cpu_has_amx_support():
            server_args.attention_backend = "torch_native"
        # Upstream switches graphs off for the *name* torch_native; a backend that wraps it needs the same answer.
        server_args.cuda_graph_config.decode.backend = Backend.DISABLED
        server_args.cuda_graph_config.prefill.backend = Backend.DISABLED
        if server_args.tp_size > 1:
            prepare_tensor_parallel(os.environ, server_args.tp_size, sorted(os.sched_getaffinity(0)))


def prepare_tensor_parallel(env: MutableMapping[str, str], ranks: int, cores: Sequence[int]) -> None:
    """Let CPU ranks start wherever SGLang would not: processes that it spawns inherit ``env``.

    Upstream wants a NUMA node for each rank unless told which cores a rank has, and sets up NCCL wherever torch brings
    it along, GPU or not. What the user has set stays.
    """
    shares = [cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks] for rank in range(ranks)]
    alone = [share or [cores[rank % len(cores)]] for rank, share in enumerate(shares)]
    env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, share)) for share in alone))
    env.setdefault("SGLANG_NCCL_SO_PATH", "/nonexistent/no-nccl-on-a-cpu")
