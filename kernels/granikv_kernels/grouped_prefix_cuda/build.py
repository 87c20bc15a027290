"""Builds the CUDA library on first use and loads it with ctypes. Needs nvcc 12.5 or later; importing needs nothing.

The library is kept in ``$GRANIKV_CACHE`` (default ``~/.cache/granikv``) under a name made of the sources, the compiler
version and the flags, so an upgrade of either builds anew. Several processes may race: each builds aside and renames.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from granikv_kernels.grouped_prefix_cuda.variants import variant_table, variants_header
from granikv_kernels.grouped_prefix_cuda.wgmma_gen import wgmma_header

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-shared",
    "-Xcompiler=-fPIC",
    "-Xcompiler=-fvisibility=default",
)


class CudaBuildError(RuntimeError):
    """The CUDA prefix kernel cannot be built here; the message says what to do."""


def find_nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for candidate in (os.environ.get("GRANIKV_NVCC"), home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"):
        found = candidate and shutil.which(candidate)
        if found:
            return found
    raise CudaBuildError(
        "the CUDA prefix kernel needs nvcc (CUDA 12.5 or later) once, to be built: install the CUDA toolkit, or set "
        "CUDA_HOME or GRANIKV_NVCC; without it use the Triton or FlashAttention-3 engine"
    )


def _generated(trials: bool) -> dict[str, str]:
    table = variant_table(trials)
    sizes = sorted({v.tile_n for v in table} | {v.head_dim for v in table})
    return {"wgmma.inc": wgmma_header(tuple(sizes)), "variants.inc": variants_header(table)}


def build(trials: bool = False, verbose: bool = False) -> Path:
    """Path of the built library; compiles it unless it is cached. ``$GRANIKV_CUDA_LIB`` names one built elsewhere."""
    prebuilt = os.environ.get("GRANIKV_CUDA_LIB")
    if prebuilt:
        return Path(prebuilt)
    nvcc = find_nvcc()
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    generated = _generated(trials)
    digest = hashlib.sha256("\0".join((version, *_FLAGS, *generated.values())).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("GRANIKV_CACHE") or Path.home() / ".cache" / "granikv")
    target = cache / f"grouped_prefix_{digest.hexdigest()[:20]}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        for name, text in generated.items():
            (Path(scratch) / name).write_text(text)
        made = Path(scratch) / "out.so"
        command = [nvcc, *_FLAGS, "-I", scratch, "-o", str(made), str(_SOURCES / "launch.cu")]
        if verbose:
            command[1:1] = ["-Xptxas", "-v"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CudaBuildError(f"nvcc failed ({' '.join(command)}):\n{done.stderr[-4000:]}")
        if verbose:
            print(done.stderr)
        os.replace(made, target)
    return target


class TailParams(ctypes.Structure):
    """The C struct of the same name (csrc/tail.cuh)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v", "req_to_token", "req_index", "seq_lens", "coverage")),
        ("req_stride", ctypes.c_longlong),
        ("slot_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "kv_heads", "part_base", "wide")),
    )


@functools.cache
def load(trials: bool = False) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build(trials)))
    ptr, i32, i64, f32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float
    lib.granikv_error.argtypes = [i32]
    lib.granikv_error.restype = ctypes.c_char_p
    lib.granikv_make_map.argtypes = [ptr, ptr, i64, i32, i32, i64, i32, i32]
    lib.granikv_prefix.argtypes = [i32, i32, i32, *[ptr] * 7, i64, i32, i32, i32, f32, *[ptr] * 6, i32, ptr]
    lib.granikv_merge.argtypes = [i32, i32, i32, *[ptr] * 8, i32, i32, i32, i32, ptr]
    return lib


def check(lib: ctypes.CDLL, code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what}: {lib.granikv_error(code).decode()} ({code})")
