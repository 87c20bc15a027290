"""The kernels compile for Hopper without a GPU at the shipped tuning point: in registers, on the tensor cores."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from granikv_kernels.grouped_decode import default_config, small_config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))


@pytest.fixture
def preflight() -> ModuleType:
    found = pytest.importorskip("kernel_preflight")
    if not found.CUOBJDUMP.exists():
        pytest.skip("this triton carries no cuobjdump")
    return found


def test_shipped_tuning_point_compiles(preflight: ModuleType) -> None:
    report = preflight.check(default_config(torch.bfloat16, 128))
    assert all("HGMMA" in report[name] for name in ("wide", "narrow")), report
    assert all(" stack 0 " in text for text in report.values()), report
    wide, tail = (int(report[name].split()[1]) for name in ("wide", "tail"))
    # Room for a program of the tail pass beside one of the wide grid: 64 Ki registers an SM.
    assert 256 * wide + 128 * tail <= 65536, report


def test_small_variant_compiles(preflight: ModuleType) -> None:
    small = small_config(torch.bfloat16, 128)
    assert small is not None
    report = preflight.check(small)
    assert "HGMMA" in report["wide"], report
    assert all(" stack 0 " in report[name] for name in ("wide", "tail")), report
