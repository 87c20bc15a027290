"""Grouped decode: one decode-attention layer of a batch with shared prefixes, safe to record in a CUDA graph.

The split is FlashInfer's plan / run (Ye et al. 2025). ``plan`` runs on the host when group membership changes; ``run``
only launches kernels and reads everything that may change between replays from buffers made in the constructor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from granikv_kernels.grouped_decode.arena import Arena
from granikv_kernels.grouped_decode.config import KernelConfig, PrefixTile, default_config
from granikv_kernels.grouped_decode.plan import UNIT_FIELDS, Item, Limits, StepPlan, plan_step
from granikv_kernels.grouped_prefix.kernel import prefix_kernel
from granikv_kernels.interpret import compute_dtype, launch, next_power_of_2
from granikv_kernels.merge_state.kernel import merge_kernel
from granikv_kernels.tail_attention.kernel import schedule_kernel, tail_kernel

TAIL_FIELDS = 4
LOG2_E = math.log2(math.e)


class GroupedDecode:
    """Buffers and launches for batches of at most ``max_rows`` requests.

    Args:
        max_rows: batch rows, padding included.
        max_items, max_pairs: shared stretches, and (stretch, member) pairs in all, of one plan.
        q_heads, kv_heads, head_dim: the layer's heads on this rank; ``head_dim`` 64, 128 or another power of two >= 16.
        dtype: of q, K, V and out: bfloat16, float16 or float32.
        device: where everything lives; on a CPU the kernels run in Triton's interpreter (tests).
        num_sms: multiprocessors to plan for; default: all of the device's.
        config: tuning point; default: the shipped one.
        partials_of: another op, whose memory for partials serves this one too where it is large enough. The two must
            never run at the same time.

    Rows that no item covers, an empty plan included, are the tail pass's alone. A padded row needs a valid
    ``req_pool_indices`` entry and any sequence length; its output is then harmless, or 0 where the length is 0.
    """

    def __init__(
        self,
        max_rows: int,
        max_items: int,
        max_pairs: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_sms: int | None = None,
        config: KernelConfig | None = None,
        partials_of: GroupedDecode | None = None,
    ) -> None:
        if q_heads % kv_heads:
            raise ValueError(f"{q_heads} query heads are no multiple of {kv_heads} KV heads")
        if head_dim < 16 or head_dim & (head_dim - 1):
            raise ValueError(f"head_dim {head_dim} is not a power of two of at least 16")
        self.device = torch.device(device)
        self.q_heads, self.kv_heads, self.head_dim, self.dtype = q_heads, kv_heads, head_dim, dtype
        self.gqa = q_heads // kv_heads
        self.config = config or default_config(dtype, head_dim)
        if num_sms is None:
            cuda = self.device.type == "cuda"
            num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count if cuda else 2
        self.num_sms = num_sms
        self.limits = Limits.of(max_rows, max_items, max_pairs, self.gqa, kv_heads, num_sms, self.config)
        self._split_target = max(1, num_sms * self.config.tail.units_per_sm // kv_heads)
        splits = max_rows + self._split_target
        limits = self.limits
        self._arena = Arena(
            {
                "head": 8,
                "coverage": max_rows,
                "part_ptr": max_rows + 1,
                "pair_row": limits.pairs,
                "pair_part": limits.pairs,
                "units": limits.units * UNIT_FIELDS,
            },
            self.device,
        )
        # tail_ptr is one longer than needed: a graph for fewer rows reads entry `rows`, never beyond.
        self._tail_ptr = torch.zeros(max_rows + 1, dtype=torch.int32, device=self.device)
        self._splits = torch.zeros((splits, TAIL_FIELDS), dtype=torch.int32, device=self.device)
        parts = limits.parts + splits
        self._part_out, self._part_lse = self._partials(parts, partials_of)
        self.lse = torch.empty((max_rows, q_heads), dtype=torch.float32, device=self.device)
        self._compute = compute_dtype(dtype, self.device)
        self._precision = "ieee" if dtype == torch.float32 else None
        self.plan([], np.zeros(0, np.int32))

    def _partials(self, parts: int, of: GroupedDecode | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``[parts, q_heads, head_dim]`` and ``[parts, q_heads]``, float32."""
        heads = (self.q_heads, self.head_dim)
        if of is not None and of._part_out.shape[0] >= parts and of._part_out.shape[1:] == heads:
            return of._part_out, of._part_lse
        out = torch.empty((parts, *heads), dtype=torch.float32, device=self.device)
        return out, torch.empty((parts, self.q_heads), dtype=torch.float32, device=self.device)

    @property
    def workspace_bytes(self) -> int:
        """Device memory held by this object."""
        tensors = (self._tail_ptr, self._splits, self._part_out, self._part_lse, self.lse)
        return self._arena.bytes + sum(t.numel() * t.element_size() for t in tensors)

    def poison(self) -> None:
        """Fill what kernels must write before they read it with NaN (tests)."""
        for tensor in (self._part_out, self._part_lse, self.lse):
            tensor.fill_(float("nan"))

    def plan(self, items: Sequence[Item], coverage: npt.NDArray[np.int32]) -> StepPlan:
        """Set the shared stretches of the next steps; call it when membership changes, outside a graph.

        Args:
            items: ``(first slot, tokens, batch rows)`` each; any start, any length, empty ones are skipped. A row may
                be in several items, but their slots together must be exactly its first ``coverage[row]`` tokens.
            coverage: int32 ``[n]``, tokens of each row that its items cover; rows from n on have none.

        Copies to the device on the current stream, asynchronously, from pinned memory.
        """
        if coverage.shape[0] > self.limits.rows:
            raise ValueError(f"coverage of {coverage.shape[0]} rows, the buffers hold {self.limits.rows}")
        step = plan_step(items, self.gqa, self.kv_heads, self.num_sms, self.config, self.limits)
        full = np.zeros(self.limits.rows, np.int32)
        full[: coverage.shape[0]] = coverage
        self._arena.upload(
            {
                "head": np.array([0, step.wide, step.units.shape[0]], np.int32),
                "coverage": full,
                "part_ptr": step.part_ptr,
                "pair_row": step.pair_row,
                "pair_part": step.pair_part,
                "units": step.units.reshape(-1),
            }
        )
        return step

    def schedule(self, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor) -> None:
        """Build the tail work list on the device: once a step, before the first layer; may be recorded in the graph.

        Args:
            seq_lens: int32 or int64 ``[rows]``, tokens of each request, the one being decoded included.
            req_pool_indices: int32 or int64 ``[rows]``, rows of ``req_to_token``.
        """
        launch(
            schedule_kernel, (1,),
            seq_lens, req_pool_indices, self._arena["coverage"], self._tail_ptr, self._splits,
            seq_lens.shape[0], self._split_target, self.config.part_overhead,
            ROWS=next_power_of_2(self.limits.rows), ALIGN=self.config.tail.block_n, num_warps=4,
        )  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        sm_scale: float,
        out: torch.Tensor,
        reschedule: bool = True,
    ) -> torch.Tensor:
        """Attention of one layer. Launches kernels and nothing else.

        Args:
            q: ``[rows, q_heads, head_dim]``, heads dense, any row stride.
            k_cache, v_cache: ``[slots, kv_heads, head_dim]`` with equal strides, head_dim dense.
            req_to_token: int32 ``[requests, context]``.
            req_pool_indices, seq_lens: as in :meth:`schedule`.
            sm_scale: multiplied into the scores; positive.
            out: ``[rows, q_heads, head_dim]``, heads dense, any row stride; written.
            reschedule: build the tail work list first. False where :meth:`schedule` ran for this step already.

        Returns:
            ``out``. The natural-log LSE of each row and head is left in ``self.lse [max_rows, q_heads]``.
        """
        self._check(q, k_cache, v_cache, req_to_token, out)
        if reschedule:
            self.schedule(seq_lens, req_pool_indices)
        # Wide prefix units and tails share the SMs: one is bound by arithmetic, the other by memory. Narrow units, also
        # bound by memory, come after the tails: their programs need half an SM each, and a grid starts only when all
        # programs of the grid ahead have.
        self._run_class(0, self.config.wide, q, k_cache, v_cache, sm_scale, {})
        if self.config.tails_last:
            self._run_narrow(q, k_cache, v_cache, sm_scale)
        self.run_tail(q, k_cache, v_cache, req_to_token, sm_scale)
        if not self.config.tails_last:
            self._run_narrow(q, k_cache, v_cache, sm_scale)
        self.run_merge(out)
        return out

    def _check(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        heads = (self.q_heads, self.head_dim)
        rows = q.shape[0]
        if rows > self.limits.rows:
            raise ValueError(f"{rows} rows, the buffers hold {self.limits.rows}")
        for name, tensor in (("q", q), ("out", out)):
            if tensor.shape != (rows, *heads) or tensor.stride()[1:] != (self.head_dim, 1):
                raise ValueError(f"{name} must be [{rows}, {self.q_heads}, {self.head_dim}] with dense heads")
        if k_cache.shape[1:] != (self.kv_heads, self.head_dim) or k_cache.stride(2) != 1:
            raise ValueError(f"k_cache must be [slots, {self.kv_heads}, {self.head_dim}], head_dim dense")
        if self.config.tma and k_cache.stride(1) != self.head_dim:
            raise ValueError("the tensor copy engine needs the KV heads of a slot side by side")
        if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
            raise ValueError("K and V caches must have equal shapes and strides")
        if not q.dtype == k_cache.dtype == v_cache.dtype == out.dtype == self.dtype:
            raise ValueError(f"q, K, V and out must all be {self.dtype}")
        if req_to_token.dtype != torch.int32 or req_to_token.stride(1) != 1:
            raise ValueError("req_to_token must be int32 [requests, context], rows dense")

    def _shape(self, k_cache: torch.Tensor) -> dict[str, Any]:
        return {
            "Q_HEADS": self.q_heads,
            "GQA": self.gqa,
            "D": self.head_dim,
            "SLOT_STRIDE": k_cache.stride(0),
            "HEAD_STRIDE": k_cache.stride(1),
            "COMPUTE": self._compute,
            "PRECISION": self._precision,
        }

    def run_prefix(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float) -> None:
        """The prefix pass alone: partials of every (item, member)."""
        self._run_class(0, self.config.wide, q, k_cache, v_cache, sm_scale, {})
        self._run_narrow(q, k_cache, v_cache, sm_scale)

    def _run_narrow(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sm_scale: float) -> None:
        if self.config.narrow_rows:
            self._run_class(1, self.config.narrow, q, k_cache, v_cache, sm_scale, self._pdl_launch)

    def _run_class(
        self,
        which: int,
        tile: PrefixTile,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        sm_scale: float,
        pdl_launch: dict[str, bool],
    ) -> None:
        arena, programs = self._arena, self.num_sms * tile.ctas_per_sm
        k_desc, v_desc = None, None
        if self.config.tma:
            # As [slots, kv_heads * head_dim]. Passed to the kernel by value, so safe in a graph.
            shape, strides = [k_cache.shape[0], self.kv_heads * self.head_dim], [k_cache.stride(0), 1]
            k_desc, v_desc = (
                TensorDescriptor(x, shape, strides, [tile.block_n, self.head_dim]) for x in (k_cache, v_cache)
            )
        launch(
            prefix_kernel, (programs,),
            arena["head"], arena["units"], q, q.stride(0), k_cache, v_cache, k_desc, v_desc,
            arena["pair_row"], arena["pair_part"], self._part_out, self._part_lse, sm_scale * LOG2_E, which, programs,
            **self._shape(k_cache), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.stages, TMA=self.config.tma,
            PDL=self._pdl, FIRST=not pdl_launch, num_warps=tile.warps, maxnreg=tile.max_registers, **pdl_launch,
        )  # fmt: skip

    def run_tail(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, req_to_token: torch.Tensor, sm_scale: float
    ) -> None:
        """The tail pass alone: partials of every split of every tail."""
        tile = self.config.tail
        programs = self.num_sms * tile.ctas_per_sm
        launch(
            tail_kernel, (programs,),
            self._tail_ptr, self._splits, q, q.stride(0), k_cache, v_cache, req_to_token, req_to_token.stride(0),
            self._part_out, self._part_lse, sm_scale * LOG2_E, q.shape[0], self.limits.parts, programs,
            **self._shape(k_cache), KV_HEADS=self.kv_heads, BLOCK_G=self._block_g, BLOCK_N=tile.block_n,
            STAGES=tile.stages, PDL=self._pdl, num_warps=tile.warps, maxnreg=tile.max_registers, **self._pdl_launch,
        )  # fmt: skip

    def run_merge(self, out: torch.Tensor) -> None:
        """The merge alone: partials to output and LSE."""
        c = self.config
        launch(
            merge_kernel, (out.shape[0], -(-self.q_heads // c.merge_heads)),
            self._arena["part_ptr"], self._tail_ptr, self._part_out, self._part_lse,
            out, out.stride(0), self.lse, self.limits.parts,
            Q_HEADS=self.q_heads, D=self.head_dim, BLOCK_H=c.merge_heads, BLOCK_P=c.merge_parts, PDL=self._pdl,
            num_warps=c.merge_warps, **self._pdl_launch,
        )  # fmt: skip

    @property
    def _block_g(self) -> int:
        # 16 rows are the least that a tensor-core tile takes.
        return max(16, next_power_of_2(self.gqa))

    @property
    def _pdl(self) -> bool:
        return self.config.pdl and self.device.type == "cuda"

    @property
    def _pdl_launch(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self._pdl else {}
