"""Every hook on SGLang, in one table, applied by one recorder that can prove that each of them landed.

SGLang's ``load_plugins()`` logs a failing plug-in and serves on; a hook that silently did not land would mean wrong
slot accounting. So the recorder checks signatures before, looks for its own functions in place afterwards, and the
factories refuse to build anything while one is missing.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from granikv_sglang.core import GraniKVError


@dataclass(frozen=True)
class Hook:
    """One seam: ``target`` is a dotted path, ``handler`` the runtime's method, ``parameters`` its signature."""

    target: str
    kind: HookType
    handler: str
    parameters: tuple[str, ...]
    why: str
    until: str


TABLE: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool_allocator",
        HookType.AROUND,
        "build_allocator",
        (
            "self",
            "sizes",
            "token_to_kv_pool",
            "is_dsv4_model",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
        ),
        "Builds the elastic allocator, which can carve contiguous HOT runs out of the one index space.",
        "SGLang lets a radix-cache backend name its allocator class.",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
        HookType.AROUND,
        "at_safe_point",
        ("self", "running_batch", "last_batch"),
        "The only point where promotion may run: no batch is between its preparation and its forward.",
        "SGLang offers a callback at the top of the scheduling step.",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.run_batch",
        HookType.AROUND,
        "around_run_batch",
        ("self", "batch", "pp_proxy_tensors"),
        "Builds the plan of the batch about to run and holds it for the attention backend during that forward.",
        "SGLang carries plug-in attributes from ScheduleBatch to the attention backend.",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
        HookType.BEFORE,
        "before_generate_request",
        ("self", "recv_req"),
        "Marks where the extra key ends and the LoRA id begins, so that no extra key can spell another's namespace.",
        "SGLang keeps the parts of a cache namespace apart.",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        HookType.AFTER,
        "after_internal_state",
        ("self", "recv_req"),
        "Adds GraniKV's state to /get_server_info.",
        "SGLang lets a radix cache contribute to the internal state.",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details",
        HookType.AFTER,
        "after_cached_tokens",
        ("self", "req"),
        "Adds to a request's cached tokens how many of them lay in HOT extents.",
        "SGLang lets a radix cache contribute to the breakdown of cached tokens.",
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape",
        HookType.AROUND,
        "around_capture",
        ("self", "size", "forward", "stream_idx", "variant_label"),
        "Captures one more graph per batch size and shared regime; an unshared step replays the stock graph.",
        "SGLang lets an attention backend name its graph variants.",
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._resolve_lora_variant",
        HookType.AROUND,
        "around_variant",
        ("self", "forward_batch"),
        "Replays the graph of the plan's regime for a pass whose plan is shared.",
        "SGLang lets an attention backend name its graph variants.",
    ),
    Hook(
        "sglang.srt.utils.common.support_triton",
        HookType.AROUND,
        "around_support_triton",
        ("backend",),
        "SGLang decides by backend name whether Triton may run; answers for the stock backend that is wrapped.",
        "SGLang asks the backend object instead of comparing names.",
    ),
)


@dataclass(frozen=True)
class HookStatus:
    """Outcome of one hook; ``problem`` is empty when it landed."""

    hook: Hook
    problem: str

    @property
    def landed(self) -> bool:
        return not self.problem


class Recorder:
    """Applies a table of hooks once and reports, at any later time, which of them are in place.

    Args:
        owner: the object whose methods the table's ``handler`` names.
        table: hooks; two rows on one target are refused.
    """

    def __init__(self, owner: object, table: Sequence[Hook] = TABLE) -> None:
        targets = [hook.target for hook in table]
        doubled = {target for target in targets if targets.count(target) > 1}
        if doubled:
            raise GraniKVError(f"two hooks on one target, {sorted(doubled)[0]}: make them one row of the table")
        self._owner = owner
        self._table = tuple(table)
        self._functions: dict[str, Callable[..., Any]] = {}
        self._problems: dict[str, str] = {}

    def register(self) -> None:
        """Check every target's signature and hand the matching hooks to SGLang's registry, which applies them."""
        if self._functions or self._problems:
            raise GraniKVError("GraniKV's hooks are registered already; load the plug-in once per process")
        for hook in self._table:
            problem = self._signature_problem(hook)
            if problem:
                self._problems[hook.target] = problem
                continue
            handler = getattr(self._owner, hook.handler)
            function = handler if isinstance(handler, type) else _free_function(handler)
            self._functions[hook.target] = function
            HookRegistry.register(hook.target, function, hook.kind)

    def statuses(self) -> list[HookStatus]:
        """One status per row, looked up in the live modules now."""
        return [HookStatus(hook, self._problem(hook)) for hook in self._table]

    def require_landed(self) -> None:
        """Raise GraniKVError naming the first hook that is not in place."""
        for status in self.statuses():
            if not status.landed:
                raise GraniKVError(
                    f"hook on {status.hook.target} is not in place ({status.problem}); GraniKV refuses to serve. "
                    "Install the SGLang version it was built for, or start with --granikv-off"
                )

    def _problem(self, hook: Hook) -> str:
        if hook.target in self._problems:
            return self._problems[hook.target]
        function = self._functions.get(hook.target)
        if function is None:
            return "it was never registered"
        try:
            current = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            return f"the target is gone: {error}"
        if current is not function and not any(function in _closure(layer) for layer in _layers(current)):
            return "SGLang did not apply it, or something replaced it afterwards"
        return ""

    @staticmethod
    def _signature_problem(hook: Hook) -> str:
        try:
            target = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            return f"SGLang has no such target: {error}"
        if isinstance(target, type):
            # A replaced class: what counts is that the fields which the subclass overrides are still there.
            missing = [name for name in hook.parameters if name not in target.__annotations__]
            return f"it has no field {missing[0]}" if missing else ""
        found = tuple(inspect.signature(target).parameters)
        if found != hook.parameters:
            return f"its parameters are ({', '.join(found)}), expected ({', '.join(hook.parameters)})"
        return ""


def _free_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function around a bound method: comparing bound methods compares owners, we want this very object."""

    def hooked(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    hooked.__qualname__ = f"granikv:{method.__name__}"
    return hooked


def _layers(function: Any) -> Iterator[Any]:
    """A function and everything it wraps, outermost first."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        yield function
        function = getattr(function, "__wrapped__", None)


def _closure(function: Any) -> list[Any]:
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells]
