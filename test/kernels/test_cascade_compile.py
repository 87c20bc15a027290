"""The cascade's own kernels compile for Hopper without a GPU, and nothing spills."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from granikv_kernels.cascade.kernel import (
    extent_slots_kernel,
    gather_rows_kernel,
    merge_listed_kernel,
    tail_slots_kernel,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))

INT, BF16, FLOAT = "*i32", "*bf16", "*fp32"
KERNELS = {
    "extent_slots": (extent_slots_kernel, (INT, INT, INT), {"BLOCK": 1024}),
    "tail_slots": (tail_slots_kernel, (INT, "i32", "*i64", INT, INT, INT), {"BLOCK": 1024}),
    "gather_rows": (gather_rows_kernel, (BF16, "i32", INT, INT, BF16), {"WIDTH": 4096, "BLOCK": 4096}),
    "merge_listed": (
        merge_listed_kernel,
        (INT, INT, BF16, FLOAT, BF16, FLOAT),
        {"Q_HEADS": 32, "D": 128, "BLOCK_H": 4, "BLOCK_P": 2},
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_hopper(name: str) -> None:
    preflight = pytest.importorskip("kernel_preflight")
    if not preflight.CUOBJDUMP.exists():
        pytest.skip("this triton carries no cuobjdump")
    kernel, types, constants = KERNELS[name]
    free = [arg for arg in kernel.arg_names if arg not in constants]
    signature: dict[str, Any] = dict(zip(free, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    signature = {arg: signature[arg] for arg in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(free)}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    report = preflight.resources(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}))
    assert " stack 0 " in report, report
