"""Which engine computes which regime in this process, from the device and the model's attention shapes."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from granikv_sglang.backends import Geometry, PrefixExtend, SharedDecode, build_engine, build_extend, cascade_takes
from granikv_sglang.backends.timer import EventTimer, HostTimer, LayerTimer, events_work_in_graphs
from granikv_sglang.core import GraniKVError, Regime, cache_root
from granikv_sglang.plan import Capacity, Classifier, Kind, Machine
from granikv_sglang.plan.table import Calibration, Device, find

MAX_ROWS = 1024
"""Largest decode batch with shared prefixes; a larger one runs UNIFORM."""


TIMED = ("torch", "triton", "flashinfer-python")
"""Packages whose versions a calibration belongs to: they do the computing that is timed."""


def device_of(cuda: bool) -> Device:
    """The device that this process computes on."""
    versions = {name: _version(name) for name in TIMED}
    if cuda:
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Device(found.name, Machine(Kind.CUDA, found.multi_processor_count), versions)
    return Device(_cpu_name(), Machine(Kind.CPU, 1), versions)


def _version(package: str) -> str:
    """Without the part that names a build: the same code for another CUDA."""
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return "none"


def _cpu_name() -> str:
    """The processor with its cores, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} x {os.cpu_count()}"


def calibration_of(cuda: bool) -> Calibration:
    """The calibration in force on this device."""
    return find(device_of(cuda), cache_root())


def classifier_of(regime: str, calibration: Calibration) -> Classifier:
    """The classifier; ``regime`` is the value of ``--granikv-regime``."""
    return Classifier(calibration.constants, None if regime == "auto" else Regime(regime))


def timer_of(cuda: bool, layers: int) -> LayerTimer | None:
    """Times the middle one of a model's layers: the first and the last run beside other work. None where it cannot."""
    if not cuda:
        return HostTimer(layers // 2)
    return EventTimer(layers // 2) if events_work_in_graphs() else None


def geometry_of(runner: Any) -> Geometry:
    """Attention shapes of this rank, of the runner's model and KV pool."""
    buffer = runner.token_to_kv_pool.k_buffer[0]
    _, kv_heads, head_dim = buffer.shape
    heads = runner.model_config.num_attention_heads // get_parallel().attn_tp_size
    return Geometry(heads, kv_heads, head_dim, buffer.dtype, buffer.device)


def decode_engines(runner: Any, classifier: Classifier, *, paged: bool = False) -> dict[Regime, SharedDecode]:
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


def capacities_of(engines: Mapping[Regime, SharedDecode]) -> dict[Regime, Capacity]:
    """The largest plan that the engine of each regime takes; a regime without a bound is left out."""
    return {regime: engine.capacity for regime, engine in engines.items() if engine.capacity is not None}
