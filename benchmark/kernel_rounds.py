"""Tuning points that were tried, by round: ``(what is timed, shapes, points)``. Results: results/kernel_tune_*.jsonl."""

from __future__ import annotations

from typing import Any

BIG = ["16K x 64", "16K x 128"]
SMALL = ["16K x 4", "16K x 16", "4 groups x 16", "8 groups x 8"]
ALL = ["16K x 4", "16K x 16", "16K x 64", "16K x 128", "4 groups x 16", "8 groups x 8"]


def _p(
    bm: int, sm: int, bn: int, st: int, sst: int, w: int, ctas: int, reg: int | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "block_m": bm, "small_m": sm, "block_n": bn, "stages": st, "small_stages": sst, "warps": w, "ctas_per_sm": ctas,
        "max_registers": reg,
    } | more  # fmt: skip


def _t(bn: int, st: int, w: int, ctas: int, units: int = 4) -> dict[str, Any]:
    return {
        "tail_block_n": bn,
        "tail_stages": st,
        "tail_warps": w,
        "tail_ctas_per_sm": ctas,
        "tail_units_per_sm": units,
    }


def _m(parts: int, warps: int) -> dict[str, Any]:
    return {"merge_parts": parts, "merge_warps": warps}


_B = _p(64, 64, 64, 3, 3, 4, 2)
_T = _t(64, 3, 4, 4)

ROUNDS: dict[str, list[tuple[str, list[str], list[dict[str, Any]]]]] = {
    "1": [
        (
            "prefix",
            BIG,
            [
                _p(128, 128, 64, 2, 2, 8, 1),
                _p(128, 128, 64, 3, 3, 8, 1),
                _p(128, 128, 64, 4, 4, 8, 1),
                _p(128, 128, 128, 2, 2, 8, 1),
                _p(128, 128, 128, 3, 3, 8, 1),
                _p(128, 128, 64, 2, 2, 8, 2, 128),
                _p(128, 128, 32, 3, 3, 8, 2, 128),
                _p(128, 128, 64, 2, 2, 4, 2),
                _p(128, 128, 32, 2, 2, 4, 2),
                _p(128, 128, 32, 3, 3, 4, 2),
                _p(64, 64, 64, 2, 2, 4, 2),
                _p(64, 64, 64, 3, 3, 4, 2),
                _p(64, 64, 32, 3, 3, 4, 3, 168),
                _p(256, 256, 32, 3, 3, 8, 1),
                _p(256, 256, 64, 2, 2, 8, 1),
            ],
        ),
        (
            "prefix",
            SMALL,
            [
                _p(128, 64, 64, 2, 2, 4, 2),
                _p(128, 64, 64, 2, 3, 4, 2),
                _p(128, 64, 64, 3, 3, 8, 1),
                _p(128, 64, 64, 3, 4, 8, 1),
                _p(64, 64, 64, 3, 3, 4, 2),
                _p(64, 64, 32, 4, 4, 4, 3, 168),
                _p(64, 64, 32, 6, 6, 4, 2),
                _p(64, 32, 64, 3, 3, 4, 2),
                _p(64, 32, 32, 4, 4, 4, 3, 168),
                _p(64, 16, 64, 3, 3, 4, 2),
            ],
        ),
        (
            "tail",
            ["16K x 16", "16K x 64", "16K x 128"],
            [
                _t(64, 1, 4, 4),
                _t(32, 1, 2, 8),
                _t(128, 1, 8, 2),
                _t(64, 3, 4, 4),
                _t(64, 4, 4, 4),
                _t(64, 5, 4, 3),
                _t(64, 6, 4, 2),
                _t(32, 4, 2, 8),
                _t(32, 5, 2, 6),
                _t(32, 5, 4, 6),
                _t(32, 6, 4, 4),
                _t(32, 7, 2, 4),
                _t(128, 4, 8, 3),
                _t(128, 4, 4, 3),
                _t(128, 5, 8, 1),
                _t(64, 5, 8, 3),
                _t(64, 5, 4, 3, 8),
            ],
        ),
        # The merge then took several heads a program: 6.2 us with one head, one warp, 8 partials; 61 with 8 heads.
        (
            "layer",
            ALL,
            [
                _p(128, 64, 64, 2, 3, 4, 2, pdl=False),
                _p(128, 64, 64, 2, 3, 4, 2, pdl=True),
                _p(128, 64, 64, 3, 3, 8, 1, pdl=False),
                _p(128, 64, 64, 3, 3, 8, 1, pdl=True),
                _p(128, 64, 64, 2, 2, 4, 2, fused=True, tail_stages=4),
                _p(64, 64, 64, 2, 2, 4, 2, fused=True, tail_stages=4),
                _p(128, 64, 64, 3, 3, 8, 1, fused=True, tail_stages=4),
            ],
        ),
    ],
    "2": [
        (
            "prefix",
            ALL,
            [
                _B,
                _B | {"tma": True},
                _B | {"lazy": True},
                _B | {"tma": True, "lazy": True},
                _p(128, 64, 64, 3, 3, 8, 1, tma=True),
                _p(128, 64, 64, 3, 3, 8, 1, lazy=True),
                _p(128, 64, 128, 2, 2, 8, 1, tma=True),
                _p(128, 128, 128, 3, 3, 8, 1, tma=True),
                _p(128, 128, 128, 3, 3, 8, 1, lazy=True),
                _p(64, 64, 32, 4, 4, 4, 2),
                _p(64, 64, 32, 5, 5, 4, 2, tma=True),
                _p(64, 64, 128, 2, 2, 4, 1),
                _B | {"unit_overhead": 1.0},
                _B | {"unit_overhead": 8.0},
            ],
        ),
        (
            "tail",
            ["16K x 4", "16K x 16", "16K x 64", "16K x 128"],
            [
                _t(64, 4, 4, 4),
                _t(64, 3, 4, 4),
                _t(64, 3, 4, 8),
                _t(64, 3, 4, 6),
                _t(64, 3, 4, 8, 8),
                _t(64, 3, 4, 4) | {"tail_evict": "evict_first"},
                _t(64, 3, 4, 4) | {"tail_flatten": True},
                _t(64, 4, 4, 3) | {"tail_flatten": True},
                _t(64, 5, 4, 3) | {"tail_flatten": True},
                _t(32, 5, 4, 5) | {"tail_flatten": True},
                _t(64, 3, 2, 4),
                _t(32, 3, 4, 5),
                _t(32, 4, 4, 8),
                _t(64, 3, 4, 4, 2),
            ],
        ),
        ("merge", BIG, [_m(16, 1), _m(8, 1), _m(4, 1), _m(16, 2), _m(16, 4)]),
        (
            "layer",
            ALL,
            [
                _B | _T | {"pdl": False},
                _B | _T,
                _B | _T | {"lazy": True},
                _B | _T | {"tma": True},
                _B | _T | {"tail_evict": "evict_first"},
                _B | _T | {"fused": True, "tail_stages": 5},
                _B | _T | {"fused": True, "tail_stages": 6},
                _p(128, 64, 64, 3, 3, 8, 1) | _T,
                _p(128, 64, 64, 3, 3, 8, 1, lazy=True) | _T,
            ],
        ),
    ],
}
