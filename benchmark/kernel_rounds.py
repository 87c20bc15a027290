"""Tuning points to measure, by round: ``(what is timed, shapes, points)``. Results are results/kernel_tune_*.jsonl.

Rounds 1 to 3 tuned earlier forms of the kernels; docs/log.md says what they tried and what lost.
"""

from __future__ import annotations

from dataclasses import replace

from granikv_kernels.grouped_decode import KernelConfig, PrefixTile, TailTile
from granikv_kernels.record import DecodeCase

ALL = ["16K x 4", "16K x 16", "16K x 32", "16K x 64", "16K x 128", "4 groups x 16", "8 groups x 8"]
W, N, T = PrefixTile, PrefixTile, TailTile
MEMBERS = 16
HETERO = DecodeCase(
    "hetero 8 x 16", 32, 8, 128,
    tuple((2048 * (i + 1), tuple(range(MEMBERS * i, MEMBERS * (i + 1)))) for i in range(8)), (192,) * (8 * MEMBERS),
)  # fmt: skip
ONE_HEAD = DecodeCase("8/1 8K x 4", 8, 1, 128, ((8192, tuple(range(4))),), (256,) * 4)
ONE_HEAD_16 = DecodeCase("8/1 16K x 16", 8, 1, 128, ((16384, tuple(range(16))),), (256,) * 16)
SMOL = DecodeCase("9/3 2K x 8", 9, 3, 64, ((2048, tuple(range(8))),), (256,) * 8)
EXTRA = (HETERO, ONE_HEAD, ONE_HEAD_16, SMOL)
"""Cases beside those of the record."""

MIXED = [HETERO.name, "4 groups x 16", "8 groups x 8", "16K x 16", "16K x 64", "16K x 128"]
# Shared memory of an SM takes two programs of 3 x 64 or 6 x 32 slots, and one of 4 x 64 or 2 x 128.
N4, N128, N128W, N32 = N(64, 64, 4, 4, 1), N(64, 128, 2, 4, 1), N(64, 128, 2, 8, 1), N(64, 32, 6, 4, 2)

S = KernelConfig(wide=W(64, 64, 4, 4, 1), narrow_rows=0)
SMALL_CASES = [HETERO.name, "4 groups x 16", "8 groups x 8", "16K x 16"]
FEW_HEADS = [ONE_HEAD.name, ONE_HEAD_16.name, SMOL.name]

ROUNDS: dict[str, list[tuple[str, list[str], list[KernelConfig]]]] = {
    "4": [
        ("prefix", ALL, [KernelConfig(), KernelConfig(narrow_rows=0), KernelConfig(narrow_rows=64)]),
        ("tail", ALL, [KernelConfig(), KernelConfig(tail=T(64, 3, 4, 4))]),
        ("merge", ALL, [KernelConfig(), KernelConfig(merge_parts=8), KernelConfig(merge_parts=10, merge_heads=2)]),
        (
            "layer",
            ALL,
            [
                KernelConfig(),
                KernelConfig(narrow_rows=0),
                KernelConfig(narrow_rows=16),
                KernelConfig(narrow_rows=64),
                KernelConfig(pdl=False),
                KernelConfig(merge_parts=8),
                KernelConfig(merge_parts=10),
                KernelConfig(merge_parts=5, merge_heads=2, merge_warps=2),
                KernelConfig(tail=T(64, 5, 4, 8)),
                KernelConfig(tail=T(64, 3, 4, 4)),
                KernelConfig(tail=T(64, 3, 4, 16)),
                KernelConfig(tail=T(64, 3, 4, 8, 8)),
                KernelConfig(wide=W(128, 64, 3, 8, 1, 184)),
                KernelConfig(wide=W(128, 64, 3, 8, 1, 176)),
                KernelConfig(wide=W(128, 64, 4, 8, 1, 192)),
                KernelConfig(unit_overhead=6.0),
                KernelConfig(unit_overhead=1.5),
            ],
        ),
    ],
    "5": [
        (
            "layer",
            ALL,
            [
                KernelConfig(),
                KernelConfig(unit_overhead=3.0),
                KernelConfig(unit_overhead=10.0),
                KernelConfig(tail=T(64, 3, 4, 8)),
                KernelConfig(tail=T(64, 5, 4, 16)),
                KernelConfig(tail=T(64, 5, 4, 8, 8)),
                KernelConfig(tail=T(64, 5, 4, 16, 8)),
                KernelConfig(tail=T(32, 6, 4, 8)),
                KernelConfig(tail=T(32, 7, 4, 16, 8)),
                KernelConfig(tail=T(64, 5, 2, 8)),
                KernelConfig(narrow_rows=0),
                KernelConfig(narrow_rows=16),
                KernelConfig(wide=W(128, 64, 3, 8, 1, 168)),
                KernelConfig(wide=W(128, 64, 3, 8, 1, 184)),
                KernelConfig(merge_parts=6),
                KernelConfig(merge_parts=5, merge_heads=2, merge_warps=2),
                KernelConfig(narrow=N(64, 64, 3, 4, 2, 248)),
                KernelConfig(narrow=N(32, 64, 3, 4, 2)),
            ],
        ),
    ],
    # Groups of 16: 64 query rows in the wide grid's 128-row tile, though bound by memory.
    "6": [
        (
            "layer",
            MIXED,
            [
                KernelConfig(equal_shares_items=0),
                KernelConfig(equal_shares_items=32),
                KernelConfig(equal_shares_items=32, unit_overhead=3.0),
                KernelConfig(equal_shares_items=32, unit_overhead=10.0),
                KernelConfig(narrow_rows=64, equal_shares_items=0),
                KernelConfig(narrow_rows=64, equal_shares_items=32),
                KernelConfig(narrow_rows=64, equal_shares_items=32, unit_overhead=3.0),
                KernelConfig(narrow_rows=64, equal_shares_items=32, unit_overhead=10.0),
                KernelConfig(narrow_rows=64, narrow=N4, equal_shares_items=0),
                KernelConfig(narrow_rows=64, narrow=N4, equal_shares_items=32),
                KernelConfig(narrow_rows=64, narrow=N128, equal_shares_items=0),
                KernelConfig(narrow_rows=64, narrow=N128, equal_shares_items=32, unit_overhead=3.0),
                KernelConfig(narrow_rows=64, narrow=N128W, equal_shares_items=32, unit_overhead=3.0),
                KernelConfig(narrow_rows=64, narrow=N(64, 64, 3, 4, 1), equal_shares_items=32),
                KernelConfig(wide=W(64, 64, 4, 4, 1), narrow_rows=0, equal_shares_items=32),
                KernelConfig(wide=W(64, 64, 3, 4, 1), narrow_rows=0, equal_shares_items=32),
                KernelConfig(narrow_rows=64, narrow=N32, equal_shares_items=32, unit_overhead=12.0),
                KernelConfig(narrow_rows=64, narrow_least=0, equal_shares_items=0),
                KernelConfig(narrow_rows=64, narrow_least=0, equal_shares_items=32),
                KernelConfig(narrow_rows=64, narrow_least=8 * 65536, equal_shares_items=0),
                KernelConfig(narrow_rows=64, equal_shares_items=32, tails_last=True),
                KernelConfig(narrow_rows=64, tails_last=True, equal_shares_items=0),
                KernelConfig(narrow_rows=64, equal_shares_items=32, tail=T(64, 5, 4, 8, 2)),
                KernelConfig(narrow_rows=64, equal_shares_items=32, tail=T(64, 5, 4, 8, 8)),
                KernelConfig(equal_shares_items=32, tail=T(64, 5, 4, 8, 2)),
                KernelConfig(equal_shares_items=32, tail=T(64, 5, 4, 8, 8)),
                KernelConfig(equal_shares_items=0),
            ],
        ),
        (
            "prefix",
            [HETERO.name],
            [
                KernelConfig(equal_shares_items=0),
                KernelConfig(equal_shares_items=32),
                KernelConfig(narrow_rows=64, equal_shares_items=0),
                KernelConfig(narrow_rows=64, equal_shares_items=32),
                KernelConfig(narrow_rows=64, narrow=N4, equal_shares_items=32),
                KernelConfig(narrow_rows=64, narrow=N128, equal_shares_items=32, unit_overhead=3.0),
            ],
        ),
        ("tail", [HETERO.name], [KernelConfig(), KernelConfig(tail=T(64, 5, 4, 8, 2))]),
        ("merge", [HETERO.name], [KernelConfig(), KernelConfig(narrow_rows=64, equal_shares_items=32)]),
    ],
    # The small variant: programs an SM, stages, the tails beside it; and partial results where there are few KV heads.
    "7": [
        (
            "layer",
            SMALL_CASES,
            [
                S,
                replace(S, unit_overhead=3.0),
                replace(S, unit_overhead=10.0),
                replace(S, merge_parts=3),
                replace(S, merge_parts=8, merge_heads=2),
                replace(S, tail=T(64, 5, 4, 8, 2)),
                replace(S, tail=T(64, 5, 4, 8, 8)),
                replace(S, tail=T(64, 4, 4, 8)),
                replace(S, tail=T(32, 6, 4, 8)),
                replace(S, tail=T(32, 8, 4, 8)),
                replace(S, wide=W(64, 64, 3, 4, 1)),
                replace(S, wide=W(64, 64, 3, 4, 1), tail=T(64, 6, 4, 8)),
                replace(S, wide=W(64, 64, 3, 4, 1, 168), tail=T(64, 4, 4, 8)),
                replace(S, wide=W(64, 64, 2, 4, 2, 168), tail=T(64, 4, 4, 8)),
                replace(S, wide=W(64, 64, 2, 4, 2, 168), tail=T(32, 6, 4, 8)),
                replace(S, wide=W(64, 32, 4, 4, 2, 168), tail=T(32, 6, 4, 8)),
                replace(S, wide=W(64, 32, 5, 4, 2, 168), tail=T(32, 5, 4, 8)),
                replace(S, wide=W(64, 32, 8, 4, 1)),
                replace(S, wide=W(64, 64, 4, 8, 1)),
                replace(S, wide=W(64, 64, 2, 4, 2, 168), tail=T(64, 4, 2, 8)),
                replace(S, part_overhead=0.0),
                replace(S, part_overhead=0.3),
            ],
        ),
        (
            "layer",
            FEW_HEADS,
            [
                replace(c, part_overhead=p, unit_overhead=u)
                for c in (S, KernelConfig())
                for p, u in ((0.0, 6.0), (0.1, 6.0), (0.15, 6.0), (0.25, 6.0), (0.15, 4.0), (0.15, 9.0))
            ],
        ),
        ("prefix", [HETERO.name], [S, replace(S, wide=W(64, 64, 2, 4, 2, 168)), replace(S, wide=W(64, 32, 8, 4, 1))]),
        ("tail", [HETERO.name], [S, replace(S, tail=T(64, 4, 4, 8)), replace(S, tail=T(32, 6, 4, 8))]),
    ],
}
