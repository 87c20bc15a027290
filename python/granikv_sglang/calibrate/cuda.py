"""Times cells on an NVIDIA GPU: one layer in a CUDA graph, as each regime runs it in a server.

UNIFORM is FlashInfer's paged decode planned as SGLang 0.5.17 plans it, BATCHED_GEMM the Triton engine, CASCADE the
FlashInfer cascade captured with an empty plan and replayed with the cell's. What an engine launches once a pass (work
lists, slots of tails) runs before the graph: shared by all layers of a model, it is no part of one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper

from granikv_sglang.backends import DecodeBatch, Geometry, SharedDecode
from granikv_sglang.backends.cascade import CascadeSharedDecode
from granikv_sglang.backends.triton import TritonSharedDecode
from granikv_sglang.calibrate.cells import MAX_ROWS, Cell, Layout, layout_of, needed_slots
from granikv_sglang.calibrate.meter import Timing
from granikv_sglang.core import Regime
from granikv_sglang.plan import Plan

WORKSPACE_BYTES = 512 << 20
MAX_LAYERS, LAYERS_BYTES = 8, 512 << 20
"""Layers of a graph, each with its own K and V: as many as fit the bytes, at least two."""
WARM, REPEATS, LONG_REPEATS, LONG_US = 3, 11, 5, 20_000.0


Layer = Callable[[int], torch.Tensor]
"""One attention layer, by its place in the graph; gives its output."""


class Inputs:
    """One cell's tensors: ``layers`` views ``[slots, kv_heads, d]`` of one K and one V buffer, and where tokens lie."""

    def __init__(self, cell: Cell, pool: tuple[torch.Tensor, torch.Tensor], context: int, layers: int) -> None:
        layout, device = cell.layout, pool[0].device
        slots = needed_slots(cell)
        values = slots * layout.kv_heads * layout.head_dim
        shape = (slots, layout.kv_heads, layout.head_dim)
        self.k, self.v = ([x[i * values : (i + 1) * values].view(shape) for i in range(layers)] for x in pool)
        heads = (cell.rows, layout.q_heads, layout.head_dim)
        self.q = [torch.randn(heads, device=device).to(pool[0].dtype) for _ in range(layers)]
        starts, tails = layout_of(cell, slots)
        self.req_to_token = torch.zeros((cell.rows, context), dtype=torch.int32, device=device)
        group = torch.arange(cell.rows, device=device) // cell.members
        covered = torch.tensor(cell.lengths, device=device)[group]
        first = torch.tensor(starts, device=device)[group]
        columns = torch.arange(max(cell.lengths), device=device)
        width = columns.shape[0]
        self.req_to_token[:, :width] = (first[:, None] + columns[None, :]).int()
        at = covered[:, None] + torch.arange(cell.tail, device=device)[None, :]
        self.req_to_token.scatter_(1, at, torch.from_numpy(tails).to(device).int())
        self.seq_lens = covered + cell.tail
        self.seq_lens_cpu = self.seq_lens.cpu()
        self.rows = torch.arange(cell.rows, device=device)
        self.scale = layout.head_dim**-0.5
        self.batch = DecodeBatch(self.req_to_token, self.rows, self.seq_lens, self.seq_lens_cpu)


class CudaMeter:
    """Median of CUDA-graph replays, per layer."""

    same_engine = False

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        # Read before each replay, so that no layer finds its K and V in L2: in a model the weights come between. Read
        # and not written: lines to be written back would slow the reads behind them.
        l2 = torch.cuda.get_device_properties(self._device).L2_cache_size
        self._flush = torch.ones(3 * l2 // 4, dtype=torch.int32, device=self._device)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._pool: tuple[torch.Tensor, torch.Tensor] | None = None
        self._context = 0
        self._engines: dict[Regime, SharedDecode] = {}
        self._inputs: tuple[Cell, Inputs] | None = None
        self._version = 0

    def open(self, layout: Layout, cells: Sequence[Cell]) -> None:
        self._inputs, self._pool, self._engines = None, None, {}
        torch.cuda.empty_cache()
        largest = max(needed_slots(c) * self._layers(c) for c in cells) * layout.kv_heads * layout.head_dim
        pool = [torch.empty(largest, dtype=torch.bfloat16, device=self._device).normal_() for _ in range(2)]
        self._pool = (pool[0], pool[1])
        # One width for all cells, a multiple of 16: Triton compiles anew for a stride that is none.
        self._context = -(-max(max(c.lengths) + c.tail for c in cells) // 16) * 16
        geometry = Geometry(layout.q_heads, layout.kv_heads, layout.head_dim, torch.bfloat16, self._device)
        slots = max(needed_slots(c) for c in cells)
        self._engines = {
            Regime.CASCADE: CascadeSharedDecode(geometry, MAX_ROWS, slots),
            Regime.BATCHED_GEMM: TritonSharedDecode(geometry, MAX_ROWS),
        }

    def time(self, cell: Cell, regime: Regime) -> Timing:
        layer, get_ready = self.recorded(cell, regime)
        return Timing(cell, regime, *time_graph(layer, self._layers(cell), self._flush, get_ready))

    def recorded(self, cell: Cell, regime: Regime) -> tuple[Layer, Callable[[], None]]:
        """What a graph records, layer by layer, and what makes it ready for replays after the capture."""
        inputs = self._inputs_of(cell)
        return self._uniform(cell, inputs) if regime is Regime.UNIFORM else self._shared(cell, inputs, regime)

    def _layers(self, cell: Cell) -> int:
        held = needed_slots(cell) * cell.layout.shape.token_bytes
        return max(2, min(MAX_LAYERS, LAYERS_BYTES // held))

    def _inputs_of(self, cell: Cell) -> Inputs:
        assert self._pool is not None
        if self._inputs is None or self._inputs[0] != cell:
            self._inputs = None
            self._inputs = (cell, Inputs(cell, self._pool, self._context, self._layers(cell)))
        return self._inputs[1]

    def _uniform(self, cell: Cell, x: Inputs) -> tuple[Layer, Callable[[], None]]:
        layout, device = cell.layout, self._device
        indptr = torch.zeros(cell.rows + 1, dtype=torch.int32, device=device)
        indptr[1:] = x.seq_lens.cumsum(0)
        within = torch.arange(self._context, device=device)[None, :] < x.seq_lens[:, None]
        indices = x.req_to_token[within]
        last = torch.ones(cell.rows, dtype=torch.int32, device=device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend="fa2", use_cuda_graph=True,
            # SGLang's rule for 2-byte values.
            use_tensor_cores=layout.shape.gqa >= 4,
            paged_kv_indptr_buffer=indptr.clone(), paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        wrapper.plan(
            indptr, indices, last, layout.q_heads, layout.kv_heads, layout.head_dim, 1, data_type=torch.bfloat16,
            q_data_type=torch.bfloat16, sm_scale=x.scale,
        )  # fmt: skip
        out = torch.empty_like(x.q[0])

        def layer(i: int) -> torch.Tensor:
            return wrapper.run(x.q[i], (x.k[i].unsqueeze(1), x.v[i].unsqueeze(1)), out=out)

        return layer, lambda: None

    def _shared(self, cell: Cell, x: Inputs, regime: Regime) -> tuple[Layer, Callable[[], None]]:
        engine = self._engines[regime]
        plan = cell.plan(regime, self._next())

        def get_ready() -> None:
            engine.prepare(plan, x.batch)
            engine.begin()

        if regime is Regime.CASCADE:
            engine.prepare(Plan(plan.decision, (), np.zeros_like(plan.coverage), self._next()), x.batch)
            engine.begin()
        else:
            get_ready()

        def layer(i: int) -> torch.Tensor:
            return engine.run(x.q[i], x.k[i], x.v[i], x.scale)

        return layer, get_ready

    def _next(self) -> int:
        self._version += 1
        return self._version


def time_graph(
    layer: Layer, layers: int, flush: torch.Tensor, before_replay: Callable[[], None]
) -> tuple[float, float, float, int]:
    """Record ``layers`` calls in a graph; median, least and greatest microseconds per call, and replays timed.

    ``flush`` is read before each replay; ``before_replay`` runs once after the capture.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(0)  # compiles and allocates outside of the capture
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(layers):
            layer(i)
    before_replay()
    began = time.perf_counter()
    for _ in range(WARM):
        graph.replay()
    torch.cuda.synchronize()
    repeats = LONG_REPEATS if (time.perf_counter() - began) * 1e6 / WARM > LONG_US else REPEATS
    marks = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for begin, end in marks:
        flush.max()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) * 1e3 / layers for begin, end in marks]
    return statistics.median(times), min(times), max(times), repeats
