"""Kernel tests run twice: interpreted on the CPU always, compiled on the GPU under the ``gpu`` mark.

The device decides how a kernel runs (``granikv_kernels.interpret``), so nothing here touches the environment.
"""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param
