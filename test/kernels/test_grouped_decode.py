"""Grouped decode against a float64 softmax: every case of the record, split and fused, replanned, padded, poisoned."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from kernel_batches import assert_lse, exact, make_batch, rms_ratio

from granikv_kernels.grouped_decode import GroupedDecode, KernelConfig, PrefixTile, TailTile, default_config
from granikv_kernels.grouped_decode.record import RECORD
from granikv_kernels.record import DecodeCase

# Small tiles: several chunks, row tiles and splits even at test sizes, and quick to interpret.
TINY = KernelConfig(
    PrefixTile(32, 32, 2, 4, 2), PrefixTile(16, 16, 2, 4, 1), 8, 0, TailTile(32, 2, 4, 2, 2),
    merge_heads=16, merge_parts=4, tma=False,
)  # fmt: skip
CASES = [pytest.param(case, id=case.name) for case in RECORD.tests]
LSE_BOUND = 2e-3


def make_op(
    case: DecodeCase, device: str, config: KernelConfig | None, rows: int | None = None, sms: int | None = None
) -> GroupedDecode:
    pairs = max(1, sum(len(rows) for _, rows in case.items))
    op = GroupedDecode(
        rows or case.rows, max(1, len(case.items)), pairs, case.q_heads, case.kv_heads, case.head_dim,
        getattr(torch, case.dtype), device, sms or (2 if device == "cpu" else None), config,
    )  # fmt: skip
    op.poison()
    return op


@pytest.mark.parametrize("case", CASES)
def test_every_case(case: DecodeCase, device: str) -> None:
    batch = make_batch(case, device)
    op = make_op(case, device, TINY)
    op.plan(batch.items, batch.coverage)
    op.run(batch.q, batch.k, batch.v, batch.req_to_token, batch.req_index, batch.seq_lens, batch.scale, batch.out)
    expected, lse = exact(batch)
    assert rms_ratio(batch.out, expected) <= RECORD.bound[case.dtype]
    assert_lse(op.lse[: case.rows], lse, LSE_BOUND)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tails_last": True}, id="tails last"),
        pytest.param({"narrow": PrefixTile(32, 64, 2, 4, 2), "narrow_rows": 64}, id="all narrow"),
        pytest.param({"narrow_least": 10**6}, id="all wide"),
        pytest.param({"tail": TailTile(32, 2, 4, 2, 8)}, id="many splits"),
    ],
)
@pytest.mark.parametrize("name", ["gqa 4", "gqa 5"])
def test_other_tuning_points(name: str, changes: dict[str, object], device: str) -> None:
    case = next(c for c in RECORD.tests if c.name == name)
    batch = make_batch(case, device, seed=6)
    op = make_op(case, device, dataclasses.replace(TINY, **changes))
    op.plan(batch.items, batch.coverage)
    op.run(batch.q, batch.k, batch.v, batch.req_to_token, batch.req_index, batch.seq_lens, batch.scale, batch.out)
    expected, lse = exact(batch)
    assert rms_ratio(batch.out, expected) <= RECORD.bound[case.dtype]
    assert_lse(op.lse[: case.rows], lse, LSE_BOUND)


@pytest.mark.parametrize("narrow_rows", [0, 16])
def test_equal_shares(narrow_rows: int, device: str) -> None:
    """Shares that meet the end of an item, units that only keep a program's step, splits of unlike length."""
    items = ((700, (0, 1)), (20, (2, 3)), (17, (4,)), (33, (5, 0)))
    case = DecodeCase("shares", 4, 2, 64, items, (5, 40, 1, 2, 0, 9), "float32")
    narrow = PrefixTile(16, 16, 2, 4, 2)
    config = dataclasses.replace(TINY, narrow=narrow, narrow_rows=narrow_rows, equal_shares_items=32, unit_overhead=1.0)
    # Two SMs' programs on a GPU too: with one for every unit there is nothing to share out.
    op = make_op(case, device, config, sms=2)
    batch = make_batch(case, device, seed=5)
    step = op.plan(batch.items, batch.coverage)
    even = make_op(case, device, dataclasses.replace(config, equal_shares_items=0), sms=2)
    plain = even.plan(batch.items, batch.coverage)
    assert step.units.shape != plain.units.shape or (step.units != plain.units).any()
    assert (step.units[:, 1] == 0).any()
    op.run(batch.q, batch.k, batch.v, batch.req_to_token, batch.req_index, batch.seq_lens, batch.scale, batch.out)
    expected, lse = exact(batch)
    assert rms_ratio(batch.out, expected) <= RECORD.bound[case.dtype]
    assert_lse(op.lse[: case.rows], lse, LSE_BOUND)


@pytest.mark.parametrize("name", ["gqa 1", "gqa 4"])
def test_shipped_tuning_point(name: str, device: str) -> None:
    case = next(c for c in RECORD.tests if c.name == name)
    config = default_config(getattr(torch, case.dtype), case.head_dim)
    batch = make_batch(case, device, seed=3)
    op = make_op(case, device, dataclasses.replace(config, merge_heads=16) if device == "cpu" else None)
    op.plan(batch.items, batch.coverage)
    op.run(batch.q, batch.k, batch.v, batch.req_to_token, batch.req_index, batch.seq_lens, batch.scale, batch.out)
    expected, lse = exact(batch)
    assert rms_ratio(batch.out, expected) <= RECORD.bound[case.dtype]
    assert_lse(op.lse[: case.rows], lse, LSE_BOUND)


@pytest.mark.parametrize("name", ["gqa 5", "gqa 8"])
def test_tiles_through_the_copy_engine(name: str, device: str) -> None:
    case = next(c for c in RECORD.tests if c.name == name)
    batch = make_batch(case, device, seed=4)
    # Sharp softmax rows: a maximum that moves late shows a wrong rescale.
    batch.q[0] *= 6
    op = make_op(case, device, dataclasses.replace(TINY, tma=True))
    op.plan(batch.items, batch.coverage)
    op.run(batch.q, batch.k, batch.v, batch.req_to_token, batch.req_index, batch.seq_lens, batch.scale, batch.out)
    expected, lse = exact(batch)
    assert rms_ratio(batch.out, expected) <= RECORD.bound[case.dtype]
    assert_lse(op.lse[: case.rows], lse, LSE_BOUND)


def test_one_object_many_plans(device: str) -> None:
    """Groups, lengths and members change between runs of one object, the buffers poisoned in between."""
    cases = [
        DecodeCase("a", 4, 2, 64, ((70, (0, 1)), (33, (2, 3))), (5, 40, 1, 2), "float32"),
        DecodeCase("b", 4, 2, 64, (), (65, 1, 3, 9), "float32"),
        DecodeCase("c", 4, 2, 64, ((1, (0, 1, 2, 3)), (100, (3, 0))), (1, 1, 0, 64), "float32"),
    ]
    op = GroupedDecode(6, 4, 8, 4, 2, 64, torch.float32, device, 2, dataclasses.replace(TINY, merge_heads=4))
    for seed, case in enumerate(cases):
        batch = make_batch(case, device, seed)
        op.poison()
        op.plan(batch.items, batch.coverage)
        op.run(batch.q, batch.k, batch.v, batch.req_to_token, batch.req_index, batch.seq_lens, batch.scale, batch.out)
        expected, lse = exact(batch)
        assert rms_ratio(batch.out, expected) <= RECORD.bound["float32"]
        assert_lse(op.lse[:4], lse, 1e-5)


def test_padded_rows_are_harmless(device: str) -> None:
    """A graph runs more rows than the plan has: the rest has length 1 on slot 0, as SGLang pads."""
    case = DecodeCase("padded", 4, 2, 64, ((40, (0, 1)),), (3, 7), "float32")
    batch = make_batch(case, device)
    rows, pad = 5, 3
    batch.k[0] = batch.v[0] = 0.0
    req_index = torch.cat([batch.req_index, batch.req_index.new_zeros(pad)])
    seq_lens = torch.cat([batch.seq_lens, batch.seq_lens.new_ones(pad)])
    q = torch.cat([batch.q, torch.ones_like(batch.q[:1]).expand(pad, -1, -1)])
    req_to_token = torch.cat([batch.req_to_token, torch.zeros_like(batch.req_to_token[:1])])
    req_index[2:] = req_to_token.shape[0] - 1
    out = torch.full_like(q, float("nan"))
    op = make_op(case, device, TINY, rows)
    op.plan(batch.items, batch.coverage)
    op.run(q, batch.k, batch.v, req_to_token, req_index, seq_lens, batch.scale, out)
    expected, _ = exact(batch)
    assert rms_ratio(out[:2], expected) <= RECORD.bound["float32"]
    assert torch.equal(out[2:].cpu(), torch.zeros(pad, 4, 64))


def test_strided_rows_and_int32_lengths(device: str) -> None:
    """q and out may be slices of wider rows; lengths and request rows may be int32."""
    case = DecodeCase("strided", 4, 2, 64, ((40, (0, 1)),), (3, 7), "float32")
    batch = make_batch(case, device)
    wide = torch.full((2, 12, 64), float("nan"), device=device)
    wide[:, 4:8] = batch.q
    out = torch.full((2, 8, 64), float("nan"), device=device)
    op = make_op(case, device, TINY)
    op.plan(batch.items, batch.coverage)
    op.schedule(batch.seq_lens.int(), batch.req_index.int())
    op.run(
        wide[:, 4:8], batch.k, batch.v, batch.req_to_token, batch.req_index.int(), batch.seq_lens.int(), batch.scale,
        out[:, 4:], reschedule=False,
    )  # fmt: skip
    assert rms_ratio(out[:, 4:], exact(batch)[0]) <= RECORD.bound["float32"]
    assert torch.isnan(out[:, :4]).all()


def test_refusals() -> None:
    op = GroupedDecode(2, 1, 2, 4, 2, 64, torch.float32, "cpu", 2, TINY)
    with pytest.raises(ValueError, match="exceed"):
        op.plan([(0, 4, [0]), (8, 4, [1])], np.array([4, 4], np.int32))
    with pytest.raises(ValueError, match="row 2"):
        op.plan([(0, 4, [2])], np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="power of two"):
        GroupedDecode(2, 1, 2, 4, 2, 80, torch.float32, "cpu", 2)
    q = torch.zeros(3, 4, 64)
    cache = torch.zeros(8, 2, 64)
    table = torch.zeros((4, 4), dtype=torch.int32)
    rows = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 rows"):
        op.run(q, cache, cache, table, rows, rows, 1.0, q)
    with pytest.raises(ValueError, match="must all be"):
        op.run(q[:2].half(), cache, cache, table, rows[:2], rows[:2], 1.0, q[:2].half())


@pytest.mark.gpu
def test_capture_small_replay_large() -> None:
    """One graph, captured with an empty plan and short lengths, replayed with groups; workspace poisoned in between."""
    case = next(c for c in RECORD.tests if c.name == "gqa 4")
    batch = make_batch(case, "cuda")
    op = make_op(case, "cuda", None)
    seq_lens = torch.ones_like(batch.seq_lens)

    def layer() -> None:
        op.run(batch.q, batch.k, batch.v, batch.req_to_token, batch.req_index, seq_lens, batch.scale, batch.out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for seed in range(3):
        other = make_batch(case, "cuda", seed)
        for name in ("q", "k", "v", "req_to_token", "req_index"):
            getattr(batch, name).copy_(getattr(other, name))
        seq_lens.copy_(other.seq_lens)
        op.poison()
        batch.out.fill_(float("nan"))
        op.plan(other.items, other.coverage)
        graph.replay()
        expected, lse = exact(other)
        assert rms_ratio(batch.out, expected) <= RECORD.bound[case.dtype]
        assert_lse(op.lse[: case.rows], lse, LSE_BOUND)


@pytest.mark.parametrize(("part_overhead", "splits"), [(0.0, 64), (0.15, 26)])
def test_a_long_tail_is_cut_no_finer_than_its_merge_is_worth(part_overhead: float, splits: int, device: str) -> None:
    config = dataclasses.replace(TINY, part_overhead=part_overhead)
    op = GroupedDecode(4, 1, 1, 8, 1, 16, torch.float32, device, 132, config)
    lengths = torch.full((4,), 4096, dtype=torch.int64, device=device)
    op.schedule(lengths, torch.arange(4, device=device))
    assert op._tail_ptr.diff().tolist()[:4] == [splits] * 4
    cut = op._splits[: 4 * splits].cpu()
    assert cut[:, 2].view(4, -1)[0].tolist() == list(range(0, 4096, int(cut[0, 3])))
    assert cut[:, 3].view(4, -1)[:, -1].tolist() == [4096] * 4
