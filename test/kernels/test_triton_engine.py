"""The Triton engine's two variants, interpreted on the CPU: which plan takes which, side by side in one memory."""

from __future__ import annotations

import torch
from kernel_batches import assert_lse, exact, make_batch, rms_ratio

from granikv_kernels.grouped_decode import GroupedDecode, KernelConfig, small_config
from granikv_kernels.grouped_decode.record import RECORD
from granikv_kernels.record import DecodeCase
from granikv_sglang.backends import DecodeBatch, Geometry
from granikv_sglang.backends.triton import SMALL, TritonSharedDecode
from granikv_sglang.core import Reason, Regime
from granikv_sglang.plan import Decision, Item, Plan
from granikv_sglang.plan.work import NARROW_LEAST, NARROW_ROWS, PART_TILES, SMALL_ROWS, TAIL_UNITS

HEADS = (8, 2, 64)
FEW = DecodeCase("few", *HEADS, ((70, (0, 1, 2)), (21, (1, 2))), (5, 40, 1), "bfloat16")
MANY = DecodeCase("many", *HEADS, ((90, tuple(range(17))),), tuple(range(1, 18)), "bfloat16")


def engine_of(dtype: torch.dtype = torch.bfloat16) -> TritonSharedDecode:
    return TritonSharedDecode(Geometry(*HEADS, dtype, torch.device("cpu")), 20)


def plan_of(items, coverage, version: int, variant: str | None = None) -> Plan:
    made = tuple(Item(start, n, tuple(rows), i) for i, (start, n, rows) in enumerate(items))
    return Plan(Decision(Regime.BATCHED_GEMM, Reason.FORCED), made, coverage, version, variant)


def test_small_groups_take_the_small_tile_and_one_large_group_does_not() -> None:
    engine = engine_of()
    assert engine.variants == ("", SMALL)
    most = SMALL_ROWS // 4
    for members, variant in ((2, SMALL), (most, SMALL), (most + 1, "")):
        items = [(0, 50, range(2)), (64, 50, range(members))]
        assert engine.variant_of(plan_of(items, None, 1)) == variant
    assert engine.variant_of(plan_of([(0, 50, range(most + 1))], None, 1, SMALL)) == SMALL  # while a graph is captured
    assert engine_of(torch.float32).variants == ("",)


def test_both_variants_are_right_in_turn_and_share_their_partials() -> None:
    engine = engine_of()
    small, wide = engine._ops[SMALL], engine._ops[""]
    assert small._part_out.data_ptr() == wide._part_out.data_ptr()
    for version, case in enumerate([FEW, MANY, FEW, MANY]):
        batch = make_batch(case, "cpu", seed=version)
        for op in engine._ops.values():
            op.poison()
        lens = batch.seq_lens
        plan = plan_of(batch.items, batch.coverage, version)
        engine.prepare(plan, DecodeBatch(batch.req_to_token, batch.req_index, lens, lens))
        assert engine._op is (small if case is FEW else wide)
        engine.begin()
        out = engine.run(batch.q, batch.k, batch.v, batch.scale)
        expected, lse = exact(batch)
        assert rms_ratio(out, expected) <= RECORD.bound["bfloat16"]
        assert_lse(engine._op.lse[: case.rows], lse, 2e-3)


def test_partials_too_small_to_share_are_an_ops_own() -> None:
    less = GroupedDecode(2, 1, 2, *HEADS, torch.bfloat16, "cpu", 2)
    more = GroupedDecode(8, 4, 16, *HEADS, torch.bfloat16, "cpu", 2, partials_of=less)
    assert more._part_out.data_ptr() != less._part_out.data_ptr()


def test_the_cost_model_knows_the_tiles() -> None:
    shipped, small = KernelConfig(), small_config(torch.bfloat16, 128)
    assert small is not None and (small.wide.block_m, small.narrow_rows) == (SMALL_ROWS, 0)
    assert (shipped.narrow_rows, shipped.narrow_least) == (NARROW_ROWS, NARROW_LEAST)
    for config in (shipped, small):
        assert (config.part_overhead, config.tail.units_per_sm) == (PART_TILES, TAIL_UNITS)
