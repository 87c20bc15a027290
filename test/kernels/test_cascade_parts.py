"""The cascade's own kernels against their references: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from granikv_kernels.cascade import (
    extent_slots_reference,
    gather_rows_reference,
    merge_listed_reference,
    tail_slots_reference,
)
from granikv_kernels.cascade.launch import extent_slots, gather_rows, merge_listed, tail_slots


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("lens", [(5,), (0, 3000, 1), (1024, 0, 0), (17000, 1023, 2)])
def test_extent_slots(lens: tuple[int, ...], device: str) -> None:
    starts = ints(*(256 * (i + 1) + i for i in range(len(lens))))
    indptr = torch.cat([ints(0), torch.tensor(lens).cumsum(0).int()])
    out = torch.full((sum(lens) + 5,), -1, dtype=torch.int32, device=device)
    extent_slots(starts.to(device), indptr.to(device), out)
    assert torch.equal(out[: sum(lens)].cpu(), extent_slots_reference(starts, indptr))
    assert (out[sum(lens) :] == -1).all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_tail_slots(index: torch.dtype, device: str) -> None:
    table = torch.randperm(7 * 6000, dtype=torch.int32).view(7, 6000)
    request, coverage = torch.tensor([3, 0, 6, 1], dtype=index), ints(100, 0, 5990, 7)
    lens = torch.tensor([5000, 1, 10, 0])
    indptr = torch.cat([ints(0), lens.cumsum(0).int()])
    out = torch.full((int(lens.sum()) + 3,), -1, dtype=torch.int32, device=device)
    tail_slots(*(x.to(device) for x in (table, request, coverage, indptr)), out)
    assert torch.equal(out[: int(lens.sum())].cpu(), tail_slots_reference(table, request, coverage, indptr))
    assert (out[int(lens.sum()) :] == -1).all()


@pytest.mark.parametrize("heads", [3, 8])
def test_gather_rows_takes_strided_queries_and_leaves_the_rest(heads: int, device: str) -> None:
    wide = torch.randn(6, heads + 2, 64).to(device)
    q, rows = wide[:, 1 : heads + 1], ints(5, 0, 0, 3, 99, 99)
    out = torch.full((6, heads, 64), float("nan"), device=device)
    gather_rows(q, rows.to(device), ints(4).to(device), out)
    assert torch.equal(out[:4].cpu(), gather_rows_reference(q.cpu(), rows, 4))
    assert torch.isnan(out[4:]).all()


@pytest.mark.parametrize("heads", [1, 6, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge(heads: int, dtype: torch.dtype, device: str) -> None:
    """Rows with none, one, five states; empty states whose output is NaN; an LSE out of float32's exp range."""
    torch.manual_seed(1)
    part_out, part_lse = torch.randn(9, heads, 64).to(dtype), 3 * torch.randn(9, heads)
    part_lse[2] += 300.0
    for empty in (4, 7):
        part_out[empty], part_lse[empty] = float("nan"), float("-inf")
    list_ptr, list_part = ints(0, 0, 1, 6, 8, 9, 10), ints(3, 0, 4, 8, 1, 5, 6, 2, 7, 4)
    out, lse = torch.full((6, heads, 64), float("nan"), dtype=dtype), torch.full((6, heads), float("nan"))
    out, lse = out.to(device), lse.to(device)
    merge_listed(*(x.to(device) for x in (list_ptr, list_part, part_out, part_lse)), out, lse)
    expected, expected_lse = merge_listed_reference(list_ptr, list_part, part_out, part_lse)
    assert torch.isinf(expected_lse[[0, 4, 5]]).all()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-6, atol=1e-5)


def test_the_merge_reference_is_attention_over_the_union() -> None:
    """Two states of one softmax, made apart, merge into the softmax over both; in base 2."""
    torch.manual_seed(2)
    scores, values = torch.randn(2, 12).double(), torch.randn(12, 8).double()
    parts = [slice(0, 5), slice(5, 12)]
    out = torch.stack([torch.softmax(scores[:, p], 1) @ values[p] for p in parts])
    lse = torch.stack([torch.logsumexp(scores[:, p], 1) for p in parts]) / torch.log(torch.tensor(2.0).double())
    merged, merged_lse = merge_listed_reference(ints(0, 2), ints(1, 0), out, lse)
    torch.testing.assert_close(merged[0], torch.softmax(scores, 1) @ values)
    torch.testing.assert_close(torch.exp2(merged_lse[0]), torch.exp(scores).sum(1))
