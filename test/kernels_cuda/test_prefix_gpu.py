"""The CUDA prefix kernel against the float32 reference, on a Hopper GPU."""

from __future__ import annotations

import os

import pytest
import torch

from granikv_kernels.grouped_prefix import grouped_prefix_attention_reference
from granikv_kernels.grouped_prefix_cuda import TRIALS, GroupedPrefixCuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

NAN = float("nan")
# (slot, length, members): odd lengths, unaligned starts, one member, more rows than one and two tiles, empty items.
ITEMS = [(3, 1, 1), (17, 127, 2), (205, 129, 33), (401, 0, 3), (402, 1000, 70), (1500, 333, 0), (2001, 2049, 5)]
LONG = [(5, 16001, 64)]


def _case(items, q_heads, kv_heads, dim, dtype, seed, scale_q=1.0):
    """Inputs; every slot that belongs to no item is NaN."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    slots = max(s + n for s, n, _ in items) + 300
    k = torch.full((slots, kv_heads, dim), NAN, dtype=dtype, device="cuda")
    v = torch.full((slots, kv_heads, dim), NAN, dtype=dtype, device="cuda")
    for s, n, _ in items:
        for t in (k, v):
            t[s : s + n] = torch.randn((n, kv_heads, dim), generator=gen, device="cuda").to(dtype)
    rows = max(m for _, _, m in items) + 3
    q = (scale_q * torch.randn((rows, q_heads, dim), generator=gen, device="cuda")).to(dtype)
    members = [torch.randperm(rows, generator=gen, device="cuda")[:m] for _, _, m in items]
    return q, k, v, members


def _compare(out, lse, q, k, v, items, members, scale):
    want, want_lse = grouped_prefix_attention_reference(
        q, k, v, [i[0] for i in items], [i[1] for i in items], members, scale
    )
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), finite)
    assert (lse[~finite] == float("-inf")).all()
    assert (out[~finite] == 0).all()
    if finite.any():
        assert (lse[finite] - want_lse[finite]).abs().max().item() < 5e-3
        assert ((out.float() - want.float()).norm() / want.float().norm()).item() < 1e-2


def _run(op, items, q, k, v, members, scale):
    op.part_out.fill_(NAN)
    op.part_lse.fill_(NAN)
    op.plan([i[0] for i in items], [i[1] for i in items], [m.cpu().numpy() for m in members])
    pairs = sum(m.numel() for m in members)
    out = torch.full((pairs, q.shape[1], q.shape[2]), NAN, dtype=q.dtype, device="cuda")
    lse = torch.full((pairs, q.shape[1]), NAN, device="cuda")
    op.run(q, k, v, scale)
    op.merge(out, lse)
    return out, lse


@pytest.mark.parametrize("dim", [128, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gqa", [1, 3, 4, 5, 8])
def test_ragged_items(dim, dtype, gqa):
    kv_heads = 2
    q, k, v, members = _case(ITEMS, kv_heads * gqa, kv_heads, dim, dtype, gqa)
    op = GroupedPrefixCuda(kv_heads * gqa, kv_heads, dim, dtype, max_pairs=256)
    _compare(*_run(op, ITEMS, q, k, v, members, dim**-0.5), q, k, v, ITEMS, members, dim**-0.5)


@pytest.mark.parametrize("partial", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale_q", [1.0, 12.0])  # 12: sharp softmax, the output is rescaled many times
def test_long_prefix(partial, scale_q):
    q, k, v, members = _case(LONG, 32, 8, 128, torch.bfloat16, 1, scale_q)
    op = GroupedPrefixCuda(32, 8, 128, torch.bfloat16, max_pairs=256, partial_dtype=partial)
    for _ in range(2):
        _compare(*_run(op, LONG, q, k, v, members, 128**-0.5), q, k, v, LONG, members, 128**-0.5)


@pytest.mark.skipif(not os.environ.get("GRANIKV_TRIALS"), reason="benchmark variants: set GRANIKV_TRIALS=1")
@pytest.mark.parametrize("variant", TRIALS, ids=lambda v: v.name)
def test_trial_variants(variant):
    for items in (ITEMS, LONG):
        q, k, v, members = _case(items, 32, 8, variant.head_dim, torch.bfloat16, 2, 3.0)
        op = GroupedPrefixCuda(32, 8, variant.head_dim, torch.bfloat16, max_pairs=256, variant=variant, trials=True)
        _compare(*_run(op, items, q, k, v, members, 128**-0.5), q, k, v, items, members, 128**-0.5)


def test_replans_under_one_graph():
    """Captured on one small item, replayed on others, partial buffers poisoned in between."""
    op = GroupedPrefixCuda(32, 8, 128, torch.bfloat16, max_pairs=256)
    lists = [[(9, 50, 2)], ITEMS, LONG, [(0, 0, 1)]]
    q, k, v, _ = _case(LONG, 32, 8, 128, torch.bfloat16, 3)
    k.nan_to_num_(0.5)
    v.nan_to_num_(0.25)
    q = torch.randn((128, 32, 128), device="cuda").to(torch.bfloat16)
    out = torch.full((128, 32, 128), NAN, dtype=q.dtype, device="cuda")
    lse = torch.full((128, 32), NAN, device="cuda")
    rows = [[torch.randperm(128, device="cuda")[:m] for _, _, m in items] for items in lists]
    op.plan([9], [50], [[0, 1]])
    op.run(q, k, v, 0.1)
    op.merge(out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(q, k, v, 0.1)
        op.merge(out, lse)
    for items, members in zip(lists, rows, strict=True):
        op.part_out.fill_(NAN)
        op.part_lse.fill_(NAN)
        out.fill_(NAN)
        op.plan([i[0] for i in items], [i[1] for i in items], [m.cpu().numpy() for m in members])
        graph.replay()
        pairs = sum(m.numel() for m in members)
        _compare(out[:pairs], lse[:pairs], q, k, v, items, members, 0.1)
        assert (out[pairs:] == 0).all()


def test_rows_merge_with_their_own_state():
    """Groups are batch rows: two nested items and a tail state, against softmax over the union."""
    q, k, v, _ = _case([(0, 900, 8)], 8, 2, 128, torch.bfloat16, 4)
    q = q[:8]
    scale = 128**-0.5
    members = [torch.arange(8, device="cuda"), torch.tensor([6, 1, 3, 4], device="cuda")]
    tail = [torch.arange(8, device="cuda")]
    own, own_lse = grouped_prefix_attention_reference(q, k, v, [800], [100], tail, scale)
    own_lse[2] = float("-inf")
    own[2] = NAN
    op = GroupedPrefixCuda(8, 2, 128, torch.bfloat16, max_pairs=64)
    op.plan([0, 500], [500, 300], [m.cpu().numpy() for m in members], rows=8)
    out, lse = torch.full_like(q, NAN), torch.full((8, 8), NAN, device="cuda")
    op.run(q, k, v, scale)
    op.merge(out, lse, own.to(torch.bfloat16), own_lse.contiguous())
    for row in range(8):
        parts = (
            [range(500)] + ([range(500, 800)] if row in (6, 1, 3, 4) else []) + ([range(800, 900)] if row != 2 else [])
        )
        slots = torch.tensor([i for p in parts for i in p], device="cuda")
        want, want_lse = grouped_prefix_attention_reference(
            q, k[slots], v[slots], [0], [slots.numel()], [torch.tensor([row], device="cuda")], scale
        )
        assert ((out[row].float() - want[0]).norm() / want.norm()).item() < 1e-2
        assert (lse[row] - want_lse[0]).abs().max().item() < 5e-3
