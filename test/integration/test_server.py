"""The server as its users meet it: OpenAI endpoint, state, metrics, flush, and refusals of the real command."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

from granikv_sglang.config import GROUPS, GraniKVConfig
from granikv_sglang.plugin.front import FRONT_TABLE
from granikv_sglang.plugin.hooks import TABLE
from granikv_sglang.server.process import free_ports


def command(*argv: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=300, **kwargs)


def one_line_refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("granikv: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_the_openai_client_gets_an_answer(granikv):
    client = openai.OpenAI(base_url=f"{granikv.url}/v1", api_key="none")
    reply = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=24,
    )
    assert "Paris" in (reply.choices[0].message.content or "")


def test_state_is_complete_and_consistent(granikv):
    state = granikv.granikv_state()
    assert state["stock_backend"] == "torch_native"
    assert state["options"]["min_tokens"] == 64
    assert state["hot_tokens"] == sum(extent["tokens"] for extent in state["extents"])
    assert all(extent["start"] >= 1 for extent in state["extents"])
    assert state["pool"]["free"] <= state["pool"]["slots"]
    assert set(state["counters"]["steps"]) == {"uniform", "cascade", "batched_gemm"}


def test_a_profile_is_written_and_the_server_lives_on(granikv, tmp_path):
    """``/start_profile`` as ``bench_serving --profile`` calls it; it ended the scheduler of a platform of ours once."""
    granikv.post("/start_profile", {"output_dir": str(tmp_path), "activities": ["CPU", "GPU"]}, parse=False)
    body = {"text": "A profile is", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    assert granikv.post("/generate", body)["text"]
    granikv.post("/stop_profile", parse=False)
    assert [path for path in tmp_path.rglob("*.gz") if path.stat().st_size > 1000]
    assert granikv.post("/generate", body)["text"]


def test_prometheus_counters_are_served(granikv):
    with urllib.request.urlopen(f"{granikv.url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    for name in (
        "granikv_promotions_total",
        "granikv_forward_passes_total",
        "granikv_prefix_not_reread_bytes_total",
        "granikv_slots",
    ):
        assert name in text


def test_flush_empties_the_arena_and_the_server_lives_on(granikv):
    for _ in range(50):
        if granikv.post("/flush_cache", parse=False) is None and not granikv.granikv_state()["extents"]:
            break
        time.sleep(0.2)
    state = granikv.granikv_state()
    assert state["extents"] == []
    assert state["pool"]["free"] == state["pool"]["slots"]
    test_the_openai_client_gets_an_answer(granikv)


def test_off_is_stock(stock):
    assert stock.granikv_state() == {}
    for path in ("/granikv", "/granikv/state"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            stock.get(path)
    log = stock.log.read_text(errors="replace")
    assert "impl=RadixCache " in log
    assert "GraniRadixCache" not in log
    assert "dtype: torch.float32" in log
    info = stock.get("/server_info")
    assert info["attention_backend"] == "torch_native"
    assert info["radix_cache_backend"] is None


def test_a_second_server_on_the_port_is_refused(granikv, model):
    done = command("-m", "granikv_sglang.launch_server", "--model-path", str(model), "--port", str(granikv.port))
    assert f"port {granikv.port}" in one_line_refusal(done)


def test_an_unsupported_flag_combination_is_refused(model):
    done = command("-m", "granikv_sglang.launch_server", "--model-path", str(model), "--disable-radix-cache")
    assert "--disable-radix-cache" in one_line_refusal(done)


def test_a_broken_hook_refuses_to_serve_and_is_named(model):
    """SGLang as a later version might be: one target has another signature."""
    code = f"""
import sys
import sglang.srt.managers.scheduler as upstream
upstream.Scheduler.run_batch = lambda self, batch, something_new: None
from granikv_sglang.server.launch import main
sys.exit(main(["--model-path", {str(model)!r}, "--port", "0"]))
"""
    refusal = one_line_refusal(command("-c", code))
    assert "Scheduler.run_batch" in refusal
    assert "refuses to serve" in refusal


def test_the_doctor_reports_every_hook(model):
    done = command("-m", "granikv_sglang.doctor")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("landed") == len(TABLE) + len(FRONT_TABLE)
    assert "all is well" in done.stdout


def test_sglang_serve_works_with_the_two_names(model, tmp_path):
    """The other way in: SGLang's own command, options through the environment or defaults."""
    (port,) = free_ports(1)
    log = (tmp_path / "serve.log").open("w")
    process = subprocess.Popen(
        [
            *(str(Path(sys.executable).parent / "sglang"), "serve", "--model-path", str(model), "--port", str(port)),
            *("--radix-cache-backend", "granikv", "--attention-backend", "granikv"),
            *("--device", "cpu", "--max-total-tokens", "4096"),
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "serve.log").read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=5) as reply:
                    state = json.load(reply)["internal_states"][0]["granikv"]
                break
            except OSError:
                time.sleep(1)
        else:
            pytest.fail("sglang serve did not come up")
        assert state["options"] == dataclasses.asdict(GraniKVConfig())
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        reply = client.completions.create(model="default", prompt="One, two, three,", max_tokens=4, temperature=0)
        assert "four" in reply.choices[0].text
    finally:
        process.terminate()
        process.wait(30)


def test_help_lists_our_flags_first():
    done = command("-m", "granikv_sglang.launch_server", "--help")
    assert done.returncode == 0
    ours, theirs = done.stdout.split("SGLang's flags:")
    assert "--granikv-min-tokens N" in ours
    assert "Default: 512." in ours
    assert all(f"{heading}:" in ours for heading in GROUPS)
    assert "--tensor-parallel-size" in theirs
