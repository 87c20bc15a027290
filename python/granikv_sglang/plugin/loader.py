"""Brings one process's GraniKV into SGLang's registries."""

from __future__ import annotations

from multiprocessing import parent_process

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.mem_cache.registry import register_radix_cache_backend
from sglang.srt.server_args import add_attention_backend_choices

from granikv_sglang.config import NAME, GraniKVConfig
from granikv_sglang.plugin.hooks import Recorder
from granikv_sglang.plugin.runtime import Runtime


def load() -> Runtime:
    """Create this process's runtime, register its factories and hooks, and return it."""
    runtime = Runtime(GraniKVConfig.from_env())
    register_radix_cache_backend(NAME, runtime.build_tree)
    register_attention_backend(NAME)(runtime.build_attention)
    add_attention_backend_choices([NAME])
    if parent_process() is None:
        # Imported here: no scheduler needs the HTTP server's modules.
        from granikv_sglang.plugin.front import FRONT_TABLE, Front  # noqa: PLC0415

        runtime.recorders.append(Recorder(Front(), FRONT_TABLE))
    for recorder in runtime.recorders:
        recorder.register()
    return runtime
