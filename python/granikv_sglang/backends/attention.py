"""The attention backend SGLang sees: a stock backend for what shares nothing, our engines for HOT prefixes.

Thin adapter. Upstream contract: ``sglang.srt.layers.attention.base_attn_backend.AttentionBackend`` at 0.5.17.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from granikv_sglang.backends.base import DecodeBatch, ExtendBatch, PrefixExtend, SharedDecode
from granikv_sglang.backends.timer import Key, LayerTimer
from granikv_sglang.core import Regime
from granikv_sglang.plan import Plan


class GraniKVAttnBackend(AttentionBackend):
    """Wraps ``stock``; takes over passes whose plan is shared.

    Args:
        stock: the backend for UNIFORM passes; it is planned and called exactly as if it stood alone.
        engines: shared decode, the engine of each regime a plan may have.
        extend: prefill over HOT prefixes; None leaves every prefill to ``stock``.
        current_plan: the plan of the forward pass being set up, or None (warm-up, capture, a pass without requests).
        req_to_token: int32 ``[requests, context]``.
        kv_pool: SGLang's K and V buffers.
        on_fault: told which engine (a regime's value, or ``prefill``) raised what, outside of capture; the pass goes on
            with ``stock``. None lets every error through.
        timer: times one layer of every decode pass; None times nothing.
    """

    def __init__(
        self,
        stock: AttentionBackend,
        engines: Mapping[Regime, SharedDecode],
        extend: PrefixExtend | None,
        current_plan: Callable[[], Plan | None],
        req_to_token: torch.Tensor,
        kv_pool: Any,
        on_fault: Callable[[str, Exception], None] | None = None,
        timer: LayerTimer | None = None,
    ) -> None:
        super().__init__()
        self.stock = stock
        self.needs_cpu_seq_lens = True
        self._engines = engines
        self._extend = extend
        self._current_plan = current_plan
        self._req_to_token = req_to_token
        self._kv_pool = kv_pool
        self._timer = timer
        self._regime = Regime.UNIFORM
        self.timed: Key | None = None
        """What :attr:`timer` can be asked for about the last decode pass."""
        self._engine: SharedDecode | None = None
        """The engine of the pass being run; None while that is the stock backend's."""
        self._taken = ""
        self._extending = False
        self._on_fault = on_fault
        self._in_capture = False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._in_capture = False
        self._extending = self._take_extend(forward_batch)
        if self._extending:
            return
        engine = self._take(forward_batch, padding=0)
        if engine is not None:
            try:
                engine.begin()
                return
            except Exception as error:
                self._fault(error)
        self.stock.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self._in_capture = in_capture
        # Capture is of the shared variant exactly while the runtime holds a shared plan for it.
        if self._take(forward_batch, padding=0 if in_capture else forward_batch.num_padding) is None:
            self.stock.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        if self._engine is not None:
            self._engine.begin()
        else:
            self.stock.init_forward_metadata_in_graph(forward_batch)

    def _take(self, forward_batch: Any, padding: int) -> SharedDecode | None:
        """The engine that does this pass, prepared; None where it is the stock backend's.

        Anything but the batch the plan was made for (a warm-up, a split batch) is the stock backend's.
        """
        plan = self._current_plan()
        self._engine, self._regime = None, Regime.UNIFORM
        self.timed = (Regime.UNIFORM, forward_batch.batch_size) if forward_batch.forward_mode.is_decode() else None
        if plan is None or not plan.shared or not forward_batch.forward_mode.is_decode():
            return None
        if forward_batch.batch_size - padding != plan.rows:
            return None
        batch = DecodeBatch(
            self._req_to_token, forward_batch.req_pool_indices, forward_batch.seq_lens, forward_batch.seq_lens_cpu
        )
        self._taken = plan.decision.regime.value
        try:
            self._engine = self._engines[plan.decision.regime]
            self._engine.prepare(plan, batch)
            self._regime = plan.decision.regime
            self.timed = (self._regime, forward_batch.batch_size)
        except Exception as error:
            self._fault(error)
        return self._engine

    def _fault(self, error: Exception) -> None:
        """An engine has raised: the rest of this pass is the stock backend's. During capture there is no rest."""
        self._engine, self._extending = None, False
        if self._in_capture or self._on_fault is None:
            raise error
        self._on_fault(self._taken, error)

    def _take_extend(self, forward_batch: Any) -> bool:
        """As :meth:`_take`, for a prefill over HOT prefixes."""
        plan = self._current_plan()
        if self._extend is None or plan is None or not plan.shared or not forward_batch.forward_mode.is_extend():
            return False
        prefix, new = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        # Coverage never exceeds what is cached; a pass where it did is not the one the plan was made for.
        if len(new) != plan.rows or (plan.coverage > prefix).any():
            return False
        batch = ExtendBatch(self._req_to_token, forward_batch.req_pool_indices, prefix, new)
        self._engine, self._taken = None, "prefill"
        try:
            self._extend.prepare(plan, batch)
        except Exception as error:
            self._fault(error)
            return False
        return True

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        timer = self._timer
        if timer is None or layer.layer_id != timer.layer:
            return self._decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        key = (self._regime, q.shape[0])
        timer.start(key)
        out = self._decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        timer.stop(key)
        return out

    def _decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if self._engine is not None:
            try:
                return self._shared_decode(self._engine, q, k, v, layer, forward_batch, save_kv_cache)
            except Exception as error:
                self._fault(error)
                # The layers before this one are done and right; this one and those below are the stock backend's.
                self.stock.init_forward_metadata(forward_batch)
        return self.stock.forward_decode(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def _shared_decode(
        self,
        engine: SharedDecode,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        caches = self._caches(k, v, layer, forward_batch, save_kv_cache)
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return engine.run(heads, *caches, layer.scaling).reshape(q.shape[0], -1)

    def _caches(
        self, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's K and V buffers, with the pass's own K and V in them where they are to be kept."""
        if save_kv_cache and k is not None:
            self._kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        return self._kv_pool.get_key_buffer(layer.layer_id), self._kv_pool.get_value_buffer(layer.layer_id)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self._extending and self._extend is not None:
            try:
                return self._shared_extend(self._extend, q, k, v, layer, forward_batch, save_kv_cache)
            except Exception as error:
                self._fault(error)
                self.stock.init_forward_metadata(forward_batch)
        return self.stock.forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def _shared_extend(
        self,
        engine: PrefixExtend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        caches = self._caches(k, v, layer, forward_batch, save_kv_cache)
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k, v = (x.view(-1, layer.tp_k_head_num, layer.qk_head_dim) for x in (k, v))
        return engine.run(heads, k, v, *caches, layer.scaling).reshape(q.shape[0], -1)

    def forward_mixed(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.stock.forward_mixed(*args, **kwargs)

    # The rest of the contract is the stock backend's, unchanged.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.stock.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.stock.get_cuda_graph_seq_len_fill_value()

    def on_after_cuda_graph_warmup(self) -> None:
        if self._engine is None:
            self.stock.on_after_cuda_graph_warmup()

    def support_triton(self) -> bool:
        return self.stock.support_triton()
