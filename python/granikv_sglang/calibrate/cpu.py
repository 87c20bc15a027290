"""Times cells on a CPU: SGLang's torch_native decode against the torch engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from granikv_sglang.backends import DecodeBatch, TorchSharedDecode
from granikv_sglang.calibrate.cells import Cell, Layout, layout_of, needed_slots
from granikv_sglang.calibrate.meter import Timing
from granikv_sglang.core import Regime

CACHE_BYTES = 64 << 20
TYPES = {2: torch.bfloat16, 4: torch.float32}


class Inputs:
    """Random tensors of one cell: ``q [rows, q_heads, d]``, caches ``[slots, kv_heads, d]``, and where tokens lie."""

    def __init__(self, cell: Cell) -> None:
        layout, slots = cell.layout, needed_slots(cell)
        dtype = TYPES[layout.element]
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.q = draw(cell.rows, layout.q_heads, layout.head_dim)
        # Other layers and the weights have driven a layer's K and V from the caches when its turn comes: so do copies.
        copies = max(1, min(8, CACHE_BYTES // (2 * slots * layout.kv_heads * layout.head_dim * layout.element)))
        k, v = (draw(slots, layout.kv_heads, layout.head_dim) for _ in range(2))
        self._layers = [(k, v), *((k.clone(), v.clone()) for _ in range(copies - 1))]
        self._turn = 0
        starts, tails = layout_of(cell, slots)
        self.req_to_token = torch.zeros((cell.rows, max(cell.lengths) + cell.tail), dtype=torch.int32)
        lens = []
        for row in range(cell.rows):
            group = row // cell.members
            tokens = cell.lengths[group]
            self.req_to_token[row, :tokens] = torch.arange(starts[group], starts[group] + tokens)
            self.req_to_token[row, tokens : tokens + cell.tail] = torch.from_numpy(tails[row])
            lens.append(tokens + cell.tail)
        self.seq_lens = torch.tensor(lens)
        self.rows = torch.arange(cell.rows)
        self.scale = layout.head_dim**-0.5

    def layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the layer whose turn it is."""
        self._turn += 1
        return self._layers[self._turn % len(self._layers)]


class CpuMeter:
    """Least of several calls of one layer, what an engine does once a pass left out: other processes only add time,
    and on a CPU a lot of it.

    Args:
        seconds: about how long one timing may take.
    """

    same_engine = True

    def __init__(self, seconds: float = 0.3) -> None:
        self._seconds = seconds
        self._cell: Cell | None = None
        self._inputs: Inputs | None = None
        self._version = 0

    def open(self, layout: Layout, cells: Sequence[Cell]) -> None:
        pass

    def time(self, cell: Cell, regime: Regime) -> Timing:
        if self._inputs is None or self._cell != cell:
            self._cell, self._inputs = cell, Inputs(cell)
        call = self.uniform(cell, self._inputs) if regime is Regime.UNIFORM else self.shared(cell, self._inputs, regime)
        call()
        times: list[float] = []
        ends = time.perf_counter() + self._seconds
        while len(times) < 3 or (time.perf_counter() < ends and len(times) < 50):
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e6)
        return Timing(cell, regime, min(times), min(times), max(times), len(times))

    def uniform(self, cell: Cell, x: Inputs) -> Callable[[], torch.Tensor]:
        """One layer of the stock backend, called as its ``forward_decode`` does."""
        runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
        stock = TorchNativeAttnBackend(runner)
        out = torch.empty_like(x.q)
        gqa = cell.layout.q_heads != cell.layout.kv_heads
        return lambda: stock._run_sdpa_forward_decode(
            x.q, out, *x.layer(), x.req_to_token, x.rows, x.seq_lens, scaling=x.scale, enable_gqa=gqa
        )

    def shared(self, cell: Cell, x: Inputs, regime: Regime) -> Callable[[], torch.Tensor]:
        """One layer of the torch engine."""
        engine = TorchSharedDecode()
        self._version += 1
        batch = DecodeBatch(x.req_to_token, x.rows, x.seq_lens, x.seq_lens)
        engine.prepare(cell.plan(regime, self._version), batch)
        engine.begin()
        return lambda: engine.run(x.q, *x.layer(), x.scale)
