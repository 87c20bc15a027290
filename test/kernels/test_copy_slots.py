"""Promotion copy: every row moved, nothing else touched."""

from __future__ import annotations

import pytest
import torch

from granikv_kernels.copy_slots import copy_slots_reference
from granikv_kernels.copy_slots.launch import SlotCopier
from granikv_kernels.copy_slots.record import RECORD
from granikv_kernels.record import CopyCase


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in RECORD.tests])
def test_every_case(case: CopyCase, device: str) -> None:
    gen = torch.Generator().manual_seed(2)
    shape = (case.slots, case.kv_heads, case.head_dim)
    buffers = [
        torch.randn(shape, generator=gen).to(getattr(torch, case.dtype)).to(device) for _ in range(2 * case.layers)
    ]
    order = torch.randperm(case.slots, generator=gen)
    source, destination = order[: case.tokens], order[-case.tokens :]
    if case.contiguous:
        destination = torch.arange(case.slots - case.tokens, case.slots)
        source = order[order < case.slots - case.tokens][: case.tokens]
    source, destination = source.to(device), destination.to(device)
    expected = [b.clone() for b in buffers]
    copy_slots_reference(expected, source, destination)
    SlotCopier(buffers).copy(source, destination)
    assert all(torch.equal(b, e) for b, e in zip(buffers, expected, strict=True))


def test_nothing_to_copy_and_refusals() -> None:
    buffer = torch.randn(4, 1, 64)
    nothing = torch.zeros(0, dtype=torch.int64)
    SlotCopier([buffer]).copy(nothing, nothing)
    with pytest.raises(ValueError, match="destinations"):
        SlotCopier([buffer]).copy(nothing, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="16 bytes"):
        SlotCopier([torch.randn(4, 1, 3)])
    with pytest.raises(ValueError, match="row sizes"):
        SlotCopier([buffer, torch.randn(4, 2, 64)])
