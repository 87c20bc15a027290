"""Compile grouped decode for Hopper on a machine without a GPU and print registers, spills and shared memory.

Usage: PYTHONPATH=kernels python benchmark/kernel_preflight.py
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from granikv_kernels.grouped_decode.config import KernelConfig, default_config
from granikv_kernels.grouped_prefix.kernel import prefix_kernel
from granikv_kernels.merge_state.kernel import merge_kernel
from granikv_kernels.tail_attention.kernel import schedule_kernel, tail_kernel

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
        if name in ("scale_log2", "part_tiles"):
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
    out = {}
    for name, tile in (("wide", c.wide), ("narrow", c.narrow)):
        prefix = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.stages, "TMA": c.tma, "FIRST": False}
        if not c.tma:
            prefix |= {"k_desc": None, "v_desc": None}
        compiled = compile_kernel(prefix_kernel, shape | prefix, num_warps=tile.warps, maxnreg=tile.max_registers)
        out[name] = resources(compiled)
    merge = {"Q_HEADS": q_heads, "D": dim, "BLOCK_H": c.merge_heads, "BLOCK_P": c.merge_parts, "PDL": c.pdl}
    out["merge"] = resources(compile_kernel(merge_kernel, merge, num_warps=c.merge_warps, launch_pdl=c.pdl))
    t = c.tail
    tail = shape | {"KV_HEADS": kv_heads, "BLOCK_G": 16, "BLOCK_N": t.block_n, "STAGES": t.stages}
    compiled = compile_kernel(tail_kernel, tail, num_warps=t.warps, maxnreg=t.max_registers, launch_pdl=c.pdl)
    out["tail"] = resources(compiled)
    out["schedule"] = resources(compile_kernel(schedule_kernel, {"ROWS": 256, "ALIGN": t.block_n}, num_warps=4))
    return out


def main() -> None:
    for name, text in check(default_config(torch.bfloat16, 128)).items():
        print(f"{name:7s} {text}")


if __name__ == "__main__":
    main()
