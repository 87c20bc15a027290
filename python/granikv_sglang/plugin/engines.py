"""Which engine computes which regime in this process, from the device and the model's attention shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.runtime_context import get_parallel

from granikv_sglang.backends import Geometry, PrefixExtend, SharedDecode, build_engine, build_extend, cascade_takes
from granikv_sglang.core import GraniKVError, Regime
from granikv_sglang.plan import CPU_THRESHOLDS, CUDA_THRESHOLDS, Capacity, Item, StaticClassifier

MAX_ROWS = 1024
"""Largest decode batch with shared prefixes; a larger one runs UNIFORM."""


def classifier_of(regime: str, cuda: bool) -> StaticClassifier:
    """The classifier for a device; ``regime`` is the value of ``--granikv-regime``."""
    forced = None if regime == "auto" else Regime(regime)
    return StaticClassifier(CUDA_THRESHOLDS if cuda else CPU_THRESHOLDS, forced)


def geometry_of(runner: Any) -> Geometry:
    """Attention shapes of this rank, of the runner's model and KV pool."""
    buffer = runner.token_to_kv_pool.k_buffer[0]
    _, kv_heads, head_dim = buffer.shape
    heads = runner.model_config.num_attention_heads // get_parallel().attn_tp_size
    return Geometry(heads, kv_heads, head_dim, buffer.dtype, buffer.device)


def decode_engines(runner: Any, classifier: StaticClassifier, *, paged: bool = False) -> dict[Regime, SharedDecode]:
    """An engine for every shared regime that ``classifier`` can choose, and for no other: engines hold device memory.

    ``paged``: items are token positions, see ``GraniRadixCache.prefix_path``. Raises GraniKVError where a forced regime
    has no engine for the model.
    """
    buffer = runner.token_to_kv_pool.k_buffer[0]
    if paged and not buffer.is_cuda:
        raise GraniKVError(
            "--granikv-hot off needs an NVIDIA GPU: the CPU's engine reads HOT extents only; leave it out"
        )
    if not buffer.is_cuda:
        return dict.fromkeys(classifier.regimes(), build_engine("torch"))
    geometry, rows = geometry_of(runner), min(MAX_ROWS, runner.req_to_token_pool.size)
    names = engine_names(classifier.regimes(), geometry, classifier.forced)
    built = {name: build_engine(name, geometry, rows, buffer.shape[0], paged) for name in set(names.values())}
    return {regime: built[name] for regime, name in names.items()}


def engine_names(regimes: Collection[Regime], geometry: Geometry, forced: Regime | None) -> dict[Regime, str]:
    """Name of the CUDA engine of each regime: FlashInfer does CASCADE where it has kernels for the model."""
    names = dict.fromkeys(regimes, "triton")
    if Regime.CASCADE in names:
        if cascade_takes(geometry):
            names[Regime.CASCADE] = "cascade"
        elif forced is Regime.CASCADE:
            raise GraniKVError(
                f"--granikv-regime cascade: FlashInfer has no kernels for {geometry.dtype} with head size "
                f"{geometry.head_dim}; use --granikv-regime batched_gemm or --dtype bfloat16"
            )
    return names


def prefill_engine(runner: Any) -> PrefixExtend:
    """FlashInfer on an NVIDIA GPU, torch elsewhere."""
    cuda = runner.token_to_kv_pool.k_buffer[0].is_cuda
    return build_extend("flashinfer" if cuda else "torch", geometry_of(runner))


@dataclass(frozen=True, slots=True)
class SharedCapacity(Capacity):
    """What every one of several engines holds: the regime is not known yet when a plan is measured."""

    parts: tuple[Capacity, ...]

    def holds(self, rows: int, items: Sequence[Item]) -> bool:
        return all(part.holds(rows, items) for part in self.parts)


def capacity_of(engines: Mapping[Regime, SharedDecode]) -> SharedCapacity | None:
    """The largest plan that all engines take; None where there is no bound."""
    parts = tuple(dict.fromkeys(e.capacity for e in engines.values() if e.capacity is not None))
    if not parts:
        return None
    return SharedCapacity(min(p.rows for p in parts), min(p.items for p in parts), min(p.pairs for p in parts), parts)
