"""The one object a process has of GraniKV: handlers of every hook, factories, and the plan of the forward in flight.

Created by :func:`granikv_sglang.plugin.register` and reached only through the hooks and factories it hands to SGLang.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from granikv_sglang.backends import SharedDecode
from granikv_sglang.backends.attention import GraniKVAttnBackend
from granikv_sglang.config import NAME, GraniKVConfig
from granikv_sglang.core import Breaker, Counters, GraniKVError, Regime
from granikv_sglang.plan import Plan, Planner, Shape
from granikv_sglang.plan.table import Calibration
from granikv_sglang.plugin import checks, namespaces
from granikv_sglang.plugin.engines import (
    calibration_of,
    capacities_of,
    classifier_of,
    decode_engines,
    prefill_engine,
    timer_of,
)
from granikv_sglang.plugin.history import History
from granikv_sglang.plugin.hooks import Recorder
from granikv_sglang.plugin.metrics import Metrics
from granikv_sglang.plugin.promoter import Promoter, live_requests
from granikv_sglang.plugin.ranks import RankCheck, group_like, rank_state
from granikv_sglang.plugin.sampling import Sampler
from granikv_sglang.plugin.state import classifier_state, state_of
from granikv_sglang.plugin.variants import GraphVariants, label_of
from granikv_sglang.pools.allocator import ElasticAllocator
from granikv_sglang.tree.radix import GraniRadixCache

logger = logging.getLogger(__name__)


class Runtime:
    """Holds what belongs together in one scheduler process; nothing else keeps state outside the SGLang objects."""

    def __init__(self, config: GraniKVConfig) -> None:
        self.config = config
        self.counters = Counters()
        self.recorders = [Recorder(self)]
        self.stock_backend = _stock_backend(config)
        self.tree: GraniRadixCache | None = None
        self._planner: Planner | None = None
        self._promoter: Promoter | None = None
        self._metrics: Metrics | None = None
        self._history = History()
        self._plan: Plan | None = None
        self._engines: dict[Regime, SharedDecode] = {}
        self._variants = GraphVariants({})
        self._breakers = {r.value: Breaker(f"regime {r.value}", "such passes run UNIFORM") for r in Regime}
        self._breakers["prefill"] = Breaker("prefill over HOT", "prefills are the stock backend's")
        self._ranks: RankCheck | None = None
        self._calibration: Calibration | None = None
        self._sampler: Sampler | None = None

    # -- factories -----------------------------------------------------------------------------------------------------

    def build_tree(self, context: Any) -> GraniRadixCache:
        """Radix-cache factory. Raises GraniKVError when a hook is missing or the configuration is unsupported."""
        self.require_sound(context.server_args, context.model_config)
        if not isinstance(context.params.token_to_kv_pool_allocator, ElasticAllocator):
            raise GraniKVError("the allocator is not GraniKV's: its hook did not run; GraniKV refuses to serve")
        tree = GraniRadixCache(context.params, self.counters)
        pool = tree.allocator.get_kvcache()
        text = context.model_config
        kv_heads, head_dim = pool.k_buffer[0].shape[1], pool.k_buffer[0].shape[2]
        heads = text.num_attention_heads // context.tp_size
        self.tree = tree
        if context.tp_size > 1:
            group = group_like(context.tp_group.cpu_group)
            self._ranks = ranks = RankCheck(group, lambda: rank_state(tree), self.counters)
            tree.on_answer = lambda tokens: ranks.note("answer", *tokens)
        self._promoter = Promoter(tree, self.config, self.counters, self._ranks)
        calibration = self._calibrated(pool.k_buffer[0].is_cuda)
        self._planner = Planner(
            classifier_of(self.config.regime, calibration),
            shape=Shape(
                heads, kv_heads, head_dim, pool.k_buffer[0].element_size(), len(pool.k_buffer), context.tp_size
            ),
            counters=self.counters,
            capacities=capacities_of(self._engines),
            whole_batch=self.config.sharing == "batch",
            usable=lambda engine: not self._breakers[engine].off,
            note=self._ranks.note if self._ranks is not None else None,
        )
        if context.tp_rank == 0:
            self._variants.report()  # SGLang has captured by now
            for line in calibration.refused:
                logger.warning("GraniKV: %s", line)
            logger.info("GraniKV classifier: %s", calibration.line)
        if context.server_args.enable_metrics:
            self._metrics = Metrics(context.server_args.served_model_name or "", context.tp_rank)
        return tree

    def build_attention(self, runner: Any) -> GraniKVAttnBackend:
        """Attention-backend factory: the stock backend, wrapped."""
        self.require_sound(runner.server_args, runner.model_config)
        cuda, layers = runner.token_to_kv_pool.k_buffer[0].is_cuda, len(runner.token_to_kv_pool.k_buffer)
        self._engines = decode_engines(
            runner, classifier_of(self.config.regime, self._calibrated(cuda)), paged=self.config.hot == "off"
        )
        self._variants = GraphVariants(self._engines, give_up=self._no_graph)
        timer = timer_of(cuda, layers)
        backend = GraniKVAttnBackend(
            ATTENTION_BACKENDS[self.stock_backend](runner),
            self._engines,
            prefill_engine(runner) if self.config.prefill == "auto" else None,
            lambda: self._plan,
            runner.req_to_token_pool.req_to_token,
            runner.token_to_kv_pool,
            self._engine_fault,
            timer,
        )
        if timer is not None:
            self._sampler = Sampler(timer, lambda: backend.timed, self.counters)
        return backend

    def _calibrated(self, cuda: bool) -> Calibration:
        """Read once: engines, graphs and plans must go by the same one."""
        if self._calibration is None:
            self._calibration = calibration_of(cuda)
        return self._calibration

    def require_sound(self, server_args: Any, model_config: Any) -> None:
        """The self-check: raises GraniKVError unless flags and model are supported and every hook is in place."""
        checks.selected(server_args)
        checks.refuse_unsupported(server_args)
        checks.refuse_options(self.config, server_args.device)
        checks.refuse_model(model_config)
        if self.stock_backend not in ATTENTION_BACKENDS or self.stock_backend == NAME:
            raise GraniKVError(f"--granikv-stock-backend {self.stock_backend!r} is not an attention backend of SGLang")
        for recorder in self.recorders:
            recorder.require_landed()

    # -- hook handlers (see hooks.TABLE) -------------------------------------------------------------------------------

    def build_allocator(self, original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
        if kwargs["token_to_kv_pool_allocator"] is not None or not checks.selected(configurator.server_args):
            return original(configurator, **kwargs)
        return ElasticAllocator(
            kwargs["sizes"].max_total_num_tokens,
            dtype=configurator.kv_cache_dtype,
            device=configurator.device,
            kvcache=kwargs["token_to_kv_pool"],
        )

    def at_safe_point(self, original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
        if self._promoter is not None:
            self._promoter.at_safe_point(scheduler, running_batch, last_batch)
        return original(scheduler, running_batch=running_batch, last_batch=last_batch)

    def around_run_batch(self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        if self._planner is None:
            return original(scheduler, batch, *args, **kw)
        self._plan = self._plan_for(batch)
        if self._ranks is not None:
            self._ranks.passed()
        self._history.note(self._plan, len(batch.reqs), self.counters.bytes_not_reread)
        try:
            return original(scheduler, batch, *args, **kw)
        finally:
            self._plan = None
            if self._metrics is not None and self.tree is not None:
                self._metrics.publish(self.counters, self.tree)

    def after_internal_state(self, result: Any, scheduler: Any, _request: Any) -> Any:
        if self.tree is not None:
            live = live_requests(scheduler.running_batch, scheduler.last_batch, scheduler.chunked_req)
            tokenizer = scheduler.tokenizer if self.config.show_text else None
            result.internal_state[NAME] = state_of(
                self.config,
                self.stock_backend,
                self.tree,
                live,
                self._history,
                tokenizer.decode if tokenizer is not None else None,
                self._variants.cost(),
                classifier_state(self._calibration) if self._calibration is not None else None,
            )
        return result

    def after_cached_tokens(self, details: Any, _streamer: Any, req: Any) -> Any:
        # Only with the last piece of an answer: a stream asks at every token, for every request.
        if not details or self.tree is None or not req.finished():
            return details
        # HOT leads every path, so the cached part is HOT up to the shorter of the two.
        hot = sum(span.length for _, span in self.tree.hot_path(req.last_node))
        return {**details, "hot": min(hot, req.cached_tokens)}

    def before_generate_request(self, scheduler: Any, request: Any) -> None:
        if self.tree is not None:
            request.extra_key = namespaces.spell(request.extra_key, request.lora_id)

    def around_capture(self, original: Callable[..., Any], runner: Any, size: int, *args: Any, **kw: Any) -> None:
        original(runner, size, *args, **kw)
        if self._is_ours(runner):
            forward, stream_idx = args[0], (args[1] if len(args) > 1 else None)
            self._variants.capture(size, self._hold, lambda label: original(runner, size, forward, stream_idx, label))

    def _engine_fault(self, engine: str, error: Exception) -> None:
        """The pass in flight goes on without its plan; the next one gets a new one, since this is half prepared."""
        self._plan = None
        self.counters.engine_faults += 1
        self._breakers[engine].fault(error)
        if self._planner is not None:
            self._planner.forget()

    def _no_graph(self, regime: Regime, error: Exception) -> None:
        self.counters.engine_faults += 1
        self._breakers[regime.value].switch_off(f"its CUDA graph could not be captured: {error}")

    def _hold(self, plan: Plan | None) -> None:
        self._plan = plan

    def around_variant(self, original: Callable[..., Any], runner: Any, forward_batch: Any) -> Any:
        label = original(runner, forward_batch)
        if self._plan is None or not self._plan.shared or not self._is_ours(runner):
            return label
        if label is not None:
            # A graph of SGLang's own (LoRA) has no shared twin: this pass stays with the stock backend.
            self._plan = None
            return label
        regime = self._plan.decision.regime
        return label_of(regime, self._engines[regime].variant_of(self._plan))

    @staticmethod
    def _is_ours(runner: Any) -> bool:
        return isinstance(runner.attn_backend, GraniKVAttnBackend)

    def around_support_triton(self, original: Callable[..., Any], backend: str) -> Any:
        return original(self.stock_backend if backend == NAME else backend)

    def _plan_for(self, batch: Any) -> Plan:
        assert self._planner is not None and self.tree is not None
        tree, planner, reqs = self.tree, self._planner, batch.reqs
        if batch.forward_mode is ForwardMode.EXTEND and self.config.prefill == "auto":
            return self._planner.prefill([tree.hot_path(req.last_node) for req in reqs], batch.extend_lens)
        if not batch.forward_mode.is_decode():
            return self._planner.other(len(reqs))
        key = (tree.epoch, tuple((req.rid, req.last_node.id) for req in reqs))
        path = tree.hot_path if self.config.hot == "on" else tree.prefix_path
        plan = planner.decode(key, lambda: [path(req.last_node) for req in reqs], lambda: _all_tokens(batch))
        if self._sampler is not None:
            self._sampler.before(plan, lambda: planner.predicted_us(_all_tokens(batch)))
        return plan


def _all_tokens(batch: Any) -> int:
    """Tokens of all contexts, as every rank's scheduler counts them; never read from the device."""
    if batch.seq_lens_cpu is not None:
        return int(batch.seq_lens_cpu.sum())
    return sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs)


def _stock_backend(config: GraniKVConfig) -> str:
    if config.stock_backend != "auto":
        return config.stock_backend
    return "flashinfer" if torch.cuda.is_available() else "torch_native"
