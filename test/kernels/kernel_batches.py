"""Inputs of the kernel tests, built from the cases of an op's record."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from granikv_kernels.record import DecodeCase


@dataclass
class Batch:
    """One layer's inputs. Every slot that no request uses is NaN, and so is ``out``."""

    case: DecodeCase
    items: list[tuple[int, int, list[int]]]
    coverage: np.ndarray
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    req_to_token: torch.Tensor
    req_index: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.case.head_dim) ** -0.5

    def slots_of(self, row: int) -> torch.Tensor:
        """All slots of a row in token order: its items', then its tail's."""
        parts = [torch.arange(start, start + n) for start, n, rows in self.items if row in rows]
        begin, end = int(self.coverage[row]), int(self.seq_lens[row])
        parts.append(self.req_to_token[self.req_index[row], begin:end].cpu().long())
        return torch.cat(parts)


def make_batch(case: DecodeCase, device: str, seed: int = 0) -> Batch:
    """Extents at unaligned starts with gaps between them, tails in random slots, requests in random rows."""
    gen = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    items, at = [], 7
    for tokens, rows in case.items:
        items.append((at, tokens, list(rows)))
        at += tokens + 13
    slots = at + sum(case.tails) + 9
    used = torch.zeros(slots, dtype=torch.bool)
    for start, tokens, _ in items:
        used[start : start + tokens] = True
    free = at + torch.randperm(slots - at, generator=gen)
    coverage = np.array(case.coverage, np.int32)
    lens = torch.tensor([c + t for c, t in zip(case.coverage, case.tails, strict=True)])
    req_to_token = torch.zeros((case.rows + 2, int(lens.max()) + 3), dtype=torch.int32)
    req_index = torch.randperm(case.rows + 2, generator=gen)[: case.rows]
    taken = 0
    for row, tail in enumerate(case.tails):
        chosen = free[taken : taken + tail]
        taken += tail
        req_to_token[req_index[row], coverage[row] : coverage[row] + tail] = chosen.int()
        used[chosen] = True

    def cache() -> torch.Tensor:
        data = torch.randn((slots, case.kv_heads, case.head_dim), generator=gen).to(dtype)
        data[~used] = float("nan")
        return data.to(device)

    q = torch.randn((case.rows, case.q_heads, case.head_dim), generator=gen).to(dtype).to(device)
    return Batch(
        case, items, coverage, q, cache(), cache(), req_to_token.to(device), req_index.to(device), lens.to(device),
        torch.full_like(q, float("nan")),
    )  # fmt: skip


def exact(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and natural-log LSE by a plain float64 softmax over the union of each row's slots."""
    case = batch.case
    gqa = case.q_heads // case.kv_heads
    q, k, v = (x.cpu().double() for x in (batch.q, batch.k, batch.v))
    out = torch.zeros((case.rows, case.q_heads, case.head_dim), dtype=torch.float64)
    lse = torch.full((case.rows, case.q_heads), float("-inf"), dtype=torch.float64)
    for row in range(case.rows):
        slots = batch.slots_of(row)
        if slots.numel() == 0:
            continue
        keys, values = (x[slots].repeat_interleave(gqa, dim=1) for x in (k, v))
        scores = torch.einsum("hd,nhd->hn", q[row], keys) * batch.scale
        lse[row] = torch.logsumexp(scores, 1)
        out[row] = torch.einsum("hn,nhd->hd", torch.exp(scores - lse[row, :, None]), values)
    return out, lse


def rms_ratio(value: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the error over RMS of the reference; NaN where anything is NaN."""
    return ((value.cpu().double() - expected).norm() / expected.norm()).item()


def assert_lse(value: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Equal within ``bound`` absolutely, and ``-inf`` at the same places."""
    value = value.cpu().double()
    empty = torch.isinf(expected)
    assert torch.equal(torch.isinf(value) & (value < 0), empty)
    assert (value - expected)[~empty].abs().max().item() <= bound
