"""Tuning points to measure, by round: ``(what is timed, shapes, points)``. Results are results/kernel_tune_*.jsonl.

Rounds 1 to 3 tuned earlier forms of the kernels; docs/log.md says what they tried and what lost.
"""

from __future__ import annotations

from granikv_kernels.grouped_decode import KernelConfig, PrefixTile, TailTile

ALL = ["16K x 4", "16K x 16", "16K x 32", "16K x 64", "16K x 128", "4 groups x 16", "8 groups x 8"]
W, N, T = PrefixTile, PrefixTile, TailTile

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
}
