"""Building the CUDA library: what is generated, and the one clear error where nvcc is missing. No GPU, no compiler."""

from __future__ import annotations

import pytest

from granikv_kernels.grouped_prefix_cuda import TRIALS, CudaBuildError
from granikv_kernels.grouped_prefix_cuda import build as build_module
from granikv_kernels.grouped_prefix_cuda.variants import variant_table, variants_header
from granikv_kernels.grouped_prefix_cuda.wgmma_gen import wgmma_header


def test_missing_nvcc_says_what_to_do(monkeypatch, tmp_path):
    for name in ("GRANIKV_CUDA_LIB", "GRANIKV_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build_module.shutil, "which", lambda _: None)
    with pytest.raises(CudaBuildError, match="CUDA_HOME or GRANIKV_NVCC"):
        build_module.build()


def test_prebuilt_library_is_taken_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("GRANIKV_CUDA_LIB", str(tmp_path / "lib.so"))
    assert build_module.build() == tmp_path / "lib.so"


def test_every_variant_has_its_id_and_its_instructions():
    table = variant_table(trials=True)
    assert len({v.name for v in table}) == len(table) and set(TRIALS) <= set(table)
    header = variants_header(table)
    for i, v in enumerate(table):
        assert f"X({i}, {v.head_dim}, {v.warpgroups}, {v.tile_n}," in header
    text = wgmma_header((64, 112))
    assert text.count("struct Wgmma<112,") == 2 and "m64n112k16.f32.f16.f16" in text
