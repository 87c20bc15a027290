"""The arithmetic of a trace's shares, on a run of two decode steps written by hand."""

import gzip
import json
import sys

import pytest

from support.benchmarks import benchmark

trace_shares = benchmark("trace_shares")


def event(name, ts, dur, cat="kernel", correlation=0):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


RUN = [
    event("process_input_requests", 0, 50, "cpu_op"),
    event("nvjet_tst_128x256", 100, 60, correlation=1),
    event("flashinfer::PrefillWithKVCacheKernel<cutlass::Tiles>", 150, 50, correlation=2),  # overlaps by 10
    event("Memcpy HtoD", 240, 10, "gpu_memcpy", 3),
    event("cudaGraphLaunch", 230, 5, "cuda_runtime", 10),
    event("prefix_kernel", 300, 40, correlation=10),
    event("ncclDevKernel_AllReduce_Sum_bf16", 340, 20, correlation=10),
    event("void cutlass::gemm", 360, 30, correlation=10),
    event("cudaGraphLaunch", 380, 5, "cuda_runtime", 11),
    event("prefix_kernel", 400, 40, correlation=11),
    event("ncclDevKernel_AllReduce_Sum_bf16", 440, 20, correlation=11),
    event("void cutlass::gemm", 460, 30, correlation=11),
    event("act_and_mul", 490, 10, correlation=11),
    event("process_batch_result", 510, 90, "cpu_op"),
]


def test_phases_and_shares_of_a_run():
    phases = trace_shares.phases_of(RUN)
    assert {name: phase.wall for name, phase in phases.items()} == {
        "start": 100, "prefill": 200, "decode": 200, "end": 100,
    }  # fmt: skip
    assert phases["prefill"].busy == 110
    assert phases["prefill"].parts == {"communication": 0, "attention": 50, "matrix products": 60, "rest": 10}
    row = trace_shares.row_of("x", phases)
    assert row["steps"] == 2
    assert row["step_ms"] == 0.1
    assert row["step_share"] == {
        "communication": 0.2, "attention": 0.4, "matrix products": 0.3, "rest": 0.05, "idle": 0.05,
    }  # fmt: skip
    assert "| x | 0.10 | 20.0% | 40.0% | 30.0% | 5.0% | 5.0% | 0.1 | 0.2 (0.1) | 0.1 |" in trace_shares.table([row])


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<...>", "attention"),
        ("merge_listed_kernel", "attention"),
        ("flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport", "communication"),
        ("void sglang::cross_device_reduce_1stage<bf16, 2>", "communication"),
        ("sm90_xmma_gemm_bf16", "matrix products"),
        ("void flashinfer::norm::FusedAddRMSNormKernel", "rest"),
    ],
)
def test_kernels_by_name(kernel, part):
    assert trace_shares.part_of(kernel) == part


def test_command_reads_gzipped_traces_and_names_a_bad_one(tmp_path, monkeypatch, capsys):
    good, bad = tmp_path / "granikv.trace.json.gz", tmp_path / "bad.json"
    with gzip.open(good, "wt") as file:
        json.dump({"traceEvents": [*RUN, {"ph": "M", "name": "process_name"}]}, file)
    bad.write_text(json.dumps({"traceEvents": [event("gemm", 0, 5)]}))
    out = tmp_path / "shares.jsonl"
    monkeypatch.setattr(sys, "argv", ["trace_shares", str(good), "--kernels", "--out", str(out)])
    assert trace_shares.main() == 0
    assert json.loads(out.read_text())["trace"] == "granikv"
    assert "granikv decode      0.080 ms  prefix_kernel" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["trace_shares", str(bad)])
    assert trace_shares.main() == 1
    assert "bad.json: no CUDA graph was launched" in capsys.readouterr().err
