"""The pure-torch references against a float64 softmax over the union of slots, and their algebra."""

from __future__ import annotations

import pytest
import torch
from kernel_batches import assert_lse, exact, make_batch, rms_ratio

from granikv_kernels.grouped_decode import grouped_decode_reference
from granikv_kernels.grouped_decode.record import RECORD
from granikv_kernels.grouped_prefix import grouped_prefix_attention_reference
from granikv_kernels.merge_state import merge_states_reference
from granikv_kernels.record import DecodeCase
from granikv_kernels.tail_attention import tail_attention_reference

NOTHING = float("-inf")


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in RECORD.tests])
def test_composition_is_one_softmax(case: DecodeCase) -> None:
    batch = make_batch(case, "cpu", seed=1)
    out, lse = grouped_decode_reference(
        batch.items, batch.coverage, batch.q.double(), batch.k.double(), batch.v.double(), batch.req_to_token,
        batch.req_index, batch.seq_lens, batch.scale,
    )  # fmt: skip
    expected, expected_lse = exact(batch)
    # Wide types in, wide types out: nothing is rounded to float32 on the way.
    assert out.dtype == torch.float64
    assert rms_ratio(out, expected) <= 1e-12
    assert_lse(lse, expected_lse, 1e-12)


def test_empty_prefix_is_the_neutral_element() -> None:
    q, cache = torch.randn(2, 4, 16), torch.full((8, 2, 16), float("nan"))
    out, lse = grouped_prefix_attention_reference(q, cache, cache, [3], [0], [torch.tensor([0, 1])], 0.5)
    assert torch.equal(out, torch.zeros(2, 4, 16)) and (lse == NOTHING).all()
    out, lse = grouped_prefix_attention_reference(q, cache, cache, [3], [2], [torch.tensor([], dtype=torch.int64)], 0.5)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


@pytest.mark.parametrize("width", [0, 3])
def test_empty_tail_is_the_neutral_element(width: int) -> None:
    q, cache = torch.randn(2, 4, 16), torch.full((8, 2, 16), float("nan"))
    slots = torch.zeros((2, width), dtype=torch.int64)
    out, lse = tail_attention_reference(q, cache, cache, slots, torch.zeros(2, dtype=torch.int64), 0.5)
    assert torch.equal(out, torch.zeros(2, 4, 16)) and (lse == NOTHING).all()


def test_merge_with_nothing_changes_nothing() -> None:
    out, lse = torch.randn(3, 2, 8), torch.randn(3, 2)
    none = torch.zeros(0, 2, 8), torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)
    for pairs in (none, (torch.zeros(2, 2, 8), torch.full((2, 2), NOTHING), torch.tensor([0, 2]))):
        merged, merged_lse = merge_states_reference(out, lse, *pairs)
        torch.testing.assert_close(merged, out)
        torch.testing.assert_close(merged_lse, lse)
    empty = torch.zeros(3, 2, 8), torch.full((3, 2), NOTHING)
    merged, merged_lse = merge_states_reference(*empty, *none)
    assert torch.equal(merged, empty[0]) and (merged_lse == NOTHING).all()


def test_merge_is_associative_and_takes_any_order() -> None:
    gen = torch.Generator().manual_seed(5)
    out, lse = (torch.randn(s, generator=gen, dtype=torch.float64) for s in ((2, 3, 8), (2, 3)))
    pair_out, pair_lse = (torch.randn(s, generator=gen, dtype=torch.float64) for s in ((5, 3, 8), (5, 3)))
    row = torch.tensor([0, 1, 0, 0, 1])
    whole = merge_states_reference(out, lse, pair_out, pair_lse * 40, row)
    step = (out, lse)
    for i in (3, 0, 4, 2, 1):
        step = merge_states_reference(*step, pair_out[i : i + 1], pair_lse[i : i + 1] * 40, row[i : i + 1])
    for a, b in zip(whole, step, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
