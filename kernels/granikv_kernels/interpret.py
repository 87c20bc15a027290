"""Launch a Triton kernel on whatever device its tensors are on: compiled on a GPU, interpreted on the CPU.

Triton decides between the two once per process, when ``triton`` is first imported (``TRITON_INTERPRET``), and then for
every kernel in it. Here the choice is made per launch, so that one process can import SGLang's kernels untouched, run
ours interpreted in its CPU tests, and compile them for a GPU target in the same test run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.experimental.gluon  # Imported by Triton at the first launch, which must not fall inside _interpreter().
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

# By the plain Python function: a JITFunction hashes by its source and everything it calls.
_interpreted: dict[Any, InterpretedFunction] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """``kernel[grid](*args, **kwargs)``, interpreted when the first tensor argument lives on the CPU."""
    tensor = next(arg for arg in args if isinstance(arg, torch.Tensor))
    if tensor.is_cuda or not isinstance(kernel, JITFunction):
        kernel[grid](*args, **kwargs)
        return
    with _interpreter():
        _interpret(kernel)[grid](*args, **kwargs)


def _interpret(fn: JITFunction) -> InterpretedFunction:
    if fn.fn not in _interpreted:
        _interpreted[fn.fn] = InterpretedFunction(fn.fn)
    return _interpreted[fn.fn]


@contextmanager
def _interpreter() -> Iterator[None]:
    """Swap every compiled helper a kernel may call for its interpreted twin, and undo all of it afterwards.

    Triton's own clean-up misses what a call of a device function patches, which would break a later compilation.
    """
    ours = [module for name, module in sys.modules.items() if name.startswith("granikv_kernels")]
    standard = sys.modules["triton.language.standard"]
    scopes: list[Any] = [*ours, standard, tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base]
    saved = [(scope, dict(vars(scope))) for scope in scopes]
    try:
        for scope, names in saved:
            for name, value in names.items():
                if isinstance(value, JITFunction):
                    setattr(scope, name, _interpret(value))
        yield
    finally:
        for scope, names in saved:
            for name, value in list(vars(scope).items()):
                if name in names and names[name] is not value:
                    setattr(scope, name, names[name])


def compute_dtype(dtype: torch.dtype, device: torch.device) -> tl.dtype:
    """Operand type of ``tl.dot``. The interpreter keeps bfloat16 as raw integers, so it multiplies in float32."""
    if device.type == "cpu":
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def next_power_of_2(value: int) -> int:
    """The least power of two that is at least ``value``."""
    return triton.next_power_of_2(value)
