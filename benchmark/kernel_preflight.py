"""Compile grouped decode for Hopper on a machine without a GPU and print registers, spills and shared memory.

Usage: PYTHONPATH=kernels python benchmark/kernel_preflight.py [field=value ...]   (fields of KernelConfig)
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from granikv_kernels.grouped_decode.config import KernelConfig
from granikv_kernels.grouped_decode.fused import fused_kernel
from granikv_kernels.grouped_prefix.kernel import prefix_kernel
from granikv_kernels.tail_attention.kernel import tail_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTERS = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "part_out_ptr": "*fp32", "part_lse_ptr": "*fp32"}


def compile_kernel(kernel: Any, constants: dict[str, Any], **options: Any) -> Any:
    """Compile for sm_90 with every pointer and stride divisible by 16."""
    signature, attrs = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in ("k_desc", "v_desc"):
            signature[name] = f"tensordesc<bf16[{constants['BLOCK_N']}, {constants['D']}]>"
            continue
        signature[name] = POINTERS.get(name, "*i32" if name.endswith("_ptr") else "i32")
        if name == "scale_log2":
            signature[name] = "fp32"
        if name.endswith(("_ptr", "_stride")):
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={k: v for k, v in options.items() if v})


def resources(compiled: Any) -> str:
    """Registers, stack (spills) and shared memory, and the matrix instructions of the SASS."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
        sass = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True).stdout
    found = {k: re.search(k + r":(\d+)", usage) for k in ("REG", "STACK")}
    numbers = " ".join(f"{k.lower()} {m.group(1)}" for k, m in found.items() if m)
    counts = {
        op: len(re.findall(r"\b" + op, sass)) for op in ("HGMMA", "HMMA", "LDGSTS", "LDG", "STL", "LDL", "BAR.SYNC")
    }
    return f"{numbers} smem {compiled.metadata.shared} " + " ".join(f"{k} {v}" for k, v in counts.items() if v)


def check(config: KernelConfig, q_heads: int = 32, kv_heads: int = 8, dim: int = 128) -> dict[str, str]:
    """Compile what ``config`` launches; kernel name to resources."""
    c = config
    shape = {
        "Q_HEADS": q_heads, "GQA": q_heads // kv_heads, "D": dim, "SLOT_STRIDE": kv_heads * dim, "HEAD_STRIDE": dim,
        "COMPUTE": tl.bfloat16, "PRECISION": None, "PDL": c.pdl,
    }  # fmt: skip
    prefix = {
        "BLOCK_M": c.block_m,
        "SMALL_M": c.small_m,
        "BLOCK_N": c.block_n,
        "STAGES": c.stages,
        "SMALL_STAGES": c.small_stages,
    }
    prefix |= {"LAZY": c.lazy, "TMA": c.tma} | ({} if c.tma else {"k_desc": None, "v_desc": None})
    tail = {"KV_HEADS": kv_heads, "EVICT": c.tail_evict, "BLOCK_G": 16}
    if c.fused:
        both = shape | prefix | tail | {"TAIL_BLOCK_N": c.tail_block_n, "TAIL_STAGES": c.tail_stages}
        return {"fused": resources(compile_kernel(fused_kernel, both, num_warps=c.warps, maxnreg=c.max_registers))}
    out = {
        "prefix": resources(compile_kernel(prefix_kernel, shape | prefix, num_warps=c.warps, maxnreg=c.max_registers))
    }
    one = shape | tail | {"BLOCK_N": c.tail_block_n, "STAGES": c.tail_stages, "FLATTEN": c.tail_flatten}
    out["tail"] = resources(compile_kernel(tail_kernel, one, num_warps=c.tail_warps, launch_pdl=c.pdl))
    return out


def main() -> None:
    fields = {f.name: f.type for f in dataclasses.fields(KernelConfig)}
    chosen: dict[str, Any] = {}
    for arg in sys.argv[1:]:
        name, value = arg.split("=")
        chosen[name] = (value == "True") if fields[name] == "bool" else int(value)
    for name, text in check(KernelConfig(**chosen)).items():
        print(f"{name:7s} {text}")


if __name__ == "__main__":
    main()
