"""The fused CPU passes against the references."""

import pytest
import torch

from granikv_kernels.cpu_attention import CpuTails, dense_attention_cpu
from granikv_kernels.grouped_prefix.reference import dense_attention_reference
from granikv_kernels.tail_attention import tail_attention_reference


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("gqa", [1, 3, 4, 5, 8])
@pytest.mark.parametrize(("members", "tokens"), [(1, 1), (1, 700), (5, 33), (16, 257)])
def test_dense(kv_heads, gqa, members, tokens):
    torch.manual_seed(members * tokens)
    q = torch.randn(members, kv_heads * gqa, 64)
    cache = torch.full((2, tokens + 9, kv_heads, 64), float("nan"))
    cache[:, 4 : 4 + tokens] = torch.randn(2, tokens, kv_heads, 64)
    k, v = cache[0, 4 : 4 + tokens], cache[1, 4 : 4 + tokens]
    for ours, expected in zip(dense_attention_cpu(q, k, v, 0.2), dense_attention_reference(q, k, v, 0.2), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gqa", [1, 3, 5])
@pytest.mark.parametrize("lens", [[1], [1, 1, 1], [3, 40, 1, 17]])
def test_tails(gqa, lens):
    torch.manual_seed(len(lens))
    kv_heads, rows, width = 3, len(lens), max(lens)
    tail_lens = torch.tensor(lens)
    # Slot 0 holds NaN and is what unused entries name.
    caches = torch.randn(2, 1 + rows * width, kv_heads, 64)
    caches[:, 0] = float("nan")
    used = torch.arange(width).unsqueeze(0) < tail_lens.unsqueeze(1)
    slots = torch.where(used, torch.arange(1, 1 + rows * width).view(rows, width), 0)
    q = torch.randn(rows, kv_heads * gqa, 64)
    got = CpuTails(slots, tail_lens, kv_heads, q.dtype).run(q, *caches, 0.2)
    expected = tail_attention_reference(q, *caches, slots, tail_lens, 0.2)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
