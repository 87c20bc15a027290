"""Prefix items and private tails in one launch, against softmax over each row's whole sequence, on a Hopper GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from granikv_kernels.grouped_prefix_cuda import FUSED, TRIALS, GroupedPrefixCuda, Tails

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

NAN = float("nan")
# Per item: (first slot, slots, member rows). A forest: rows of the second item hold the first too; row 0 holds none.
FOREST = [(11, 700, [1, 2, 3, 4, 5, 6, 7, 8]), (1000, 257, [5, 2, 7]), (2000, 130, [9])]
TAIL_LENS = [40, 1, 15, 16, 17, 0, 300, 33, 64, 5]


class World:
    """A paged cache where every slot outside items and tails is NaN."""

    def __init__(self, forest, tail_lens, q_heads, kv_heads, dim, dtype, index_dtype=torch.int64, scale_q=1.0, seed=0):
        gen = torch.Generator(device="cuda").manual_seed(seed)
        rows = len(tail_lens)
        base = max(s + n for s, n, _ in forest) + 9
        total = base + 2 * sum(tail_lens) + 64
        self.forest, self.scale = forest, dim**-0.5
        self.k = torch.full((total, kv_heads, dim), NAN, dtype=dtype, device="cuda")
        self.v = torch.full_like(self.k, NAN)
        self.q = (scale_q * torch.randn((rows, q_heads, dim), generator=gen, device="cuda")).to(dtype)
        spare = (torch.randperm(total - base, generator=gen, device="cuda") + base).tolist()
        self.slots: list[list[int]] = [[] for _ in range(rows)]
        self.coverage = np.zeros(rows, dtype=np.int32)
        for s, n, members in forest:
            for r in members:
                self.slots[r] += range(s, s + n)
                self.coverage[r] += n
        for r, n in enumerate(tail_lens):
            self.slots[r] += [spare.pop() for _ in range(n)]
        width = max(len(s) for s in self.slots) + 3
        table = torch.full((rows + 4, width), 2**30, dtype=torch.int32)  # a wild slot would fault
        index = torch.randperm(rows + 4)[:rows]
        for r, s in enumerate(self.slots):
            table[index[r], : len(s)] = torch.tensor(s, dtype=torch.int32)
        used = torch.tensor(sorted({x for s in self.slots for x in s}), device="cuda")
        for t in (self.k, self.v):
            t[used] = torch.randn((used.numel(), kv_heads, dim), generator=gen, device="cuda").to(dtype)
        lens = torch.tensor([len(s) for s in self.slots])
        self.tails = Tails(table.cuda(), index.to("cuda", index_dtype), lens.to("cuda", index_dtype))

    def plan(self, op):
        items = self.forest
        op.plan([i[0] for i in items], [i[1] for i in items], [i[2] for i in items], len(self.slots), self.coverage)

    def check(self, out, lse):
        repeat = self.q.shape[1] // self.k.shape[1]
        for r, slots in enumerate(self.slots):
            if not slots:
                assert (out[r] == 0).all() and (lse[r] == float("-inf")).all()
                continue
            k, v = (t[slots].float().repeat_interleave(repeat, dim=1) for t in (self.k, self.v))
            scores = torch.einsum("hd,nhd->hn", self.q[r].float(), k) * self.scale
            want = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
            assert (lse[r] - scores.logsumexp(-1)).abs().max().item() < 5e-3
            assert ((out[r].float() - want).norm() / want.norm()).item() < 1e-2


def _launch(op, world, poison=True):
    if poison:
        op.part_out.fill_(NAN)
        op.part_lse.fill_(NAN)
    out = torch.full_like(world.q, NAN)
    lse = torch.full(world.q.shape[:2], NAN, device="cuda")
    world.plan(op)
    op.run(world.q, world.k, world.v, world.scale, world.tails, out, lse)
    return out, lse


@pytest.mark.parametrize("dim", [128, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gqa", [1, 3, 4, 5, 8])
def test_forest_with_tails(dim, dtype, gqa):
    world = World(FOREST, TAIL_LENS, 2 * gqa, 2, dim, dtype, seed=gqa)
    op = GroupedPrefixCuda(2 * gqa, 2, dim, dtype, max_pairs=64, tails=True)
    world.check(*_launch(op, world))


@pytest.mark.parametrize("scale_q", [1.0, 12.0])
def test_tails_alone_and_uneven(scale_q):
    lens = [3000, 0, 1, 0, 700, 16, 0]
    world = World([(0, 0, [])], lens, 32, 8, 128, torch.bfloat16, torch.int32, scale_q)
    op = GroupedPrefixCuda(32, 8, 128, torch.bfloat16, max_pairs=64, tails=True)
    world.check(*_launch(op, world))


@pytest.mark.parametrize("tail", [0, 1, 256, 300])
def test_wide_batch(tail):
    lens = [max(tail - i % 3, 0) for i in range(128)]
    world = World([(3, 4099, list(range(128)))], lens, 32, 8, 128, torch.bfloat16)
    op = GroupedPrefixCuda(32, 8, 128, torch.bfloat16, max_pairs=128, tails=True)
    for _ in range(2):
        world.check(*_launch(op, world))


@pytest.mark.skipif(not os.environ.get("GRANIKV_TRIALS"), reason="benchmark variants: set GRANIKV_TRIALS=1")
@pytest.mark.parametrize("variant", [v for v in TRIALS if v.tail_ring], ids=lambda v: v.name)
def test_trial_variants(variant):
    world = World(FOREST, TAIL_LENS, 32, 8, 128, torch.bfloat16)
    op = GroupedPrefixCuda(32, 8, 128, torch.bfloat16, max_pairs=64, variant=variant, trials=True)
    world.check(*_launch(op, world))


def test_one_graph_many_steps():
    """Captured once; groups, tails and their lengths change between replays, without capturing again."""
    assert FUSED[128].tail_ring
    first = World([(0, 64, [0, 1])], [1] * 10, 32, 8, 128, torch.bfloat16, seed=1)
    worlds = [first, World(FOREST, TAIL_LENS, 32, 8, 128, torch.bfloat16, seed=2)]
    worlds.append(World([(0, 0, [])], [7 * i for i in range(10)], 32, 8, 128, torch.bfloat16, seed=3))
    size = max(w.k.shape[0] for w in worlds)
    k, v = (torch.full((size, 8, 128), NAN, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    table = torch.zeros((14, max(w.tails.req_to_token.shape[1] for w in worlds)), dtype=torch.int32, device="cuda")
    tails = Tails(table, first.tails.req_index.clone(), first.tails.seq_lens.clone())
    q, out, lse = first.q.clone(), torch.empty_like(first.q), torch.empty((10, 32), device="cuda")
    op = GroupedPrefixCuda(32, 8, 128, torch.bfloat16, max_pairs=64, tails=True)

    def put(w):
        k[: w.k.shape[0]], v[: w.v.shape[0]] = w.k, w.v
        table[:, : w.tails.req_to_token.shape[1]] = w.tails.req_to_token
        tails.req_index.copy_(w.tails.req_index)
        tails.seq_lens.copy_(w.tails.seq_lens)
        q.copy_(w.q)
        out.fill_(NAN)
        op.part_out.fill_(NAN)
        op.part_lse.fill_(NAN)
        w.plan(op)

    def step():
        op.run(q, k, v, first.scale, tails, out, lse)

    put(first)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for w in [*worlds, *worlds[::-1]]:
        put(w)
        graph.replay()
        w.check(out, lse)
