"""The launcher's command line: what it adds, what it refuses, and what ``--granikv-off`` leaves alone."""

import socket

import pytest

from granikv_sglang.config import GraniKVConfig
from granikv_sglang.core import GraniKVError
from granikv_sglang.server import launch


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def parse(model, port, *argv, has_gpu=True):
    return launch.parse(["--model-path", model, "--port", port, *argv], has_gpu=has_gpu)


def refusal(*argv) -> str:
    with pytest.raises(GraniKVError) as caught:
        launch.parse(list(argv), has_gpu=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sglangs_flags_pass_through_and_ours_are_taken_out(model, port):
    parsed = parse(model, port, "--tp", "2", "--granikv-min-tokens", "99")
    assert parsed.config == GraniKVConfig(min_tokens=99)
    assert "--granikv-min-tokens" not in parsed.sglang_args
    assert parsed.sglang_args[-6:] == (
        "--tp",
        "2",
        "--attention-backend",
        "granikv",
        "--radix-cache-backend",
        "granikv",
    )


def test_off_is_stock(model, port):
    given = ["--model-path", model, "--port", port, "--attention-backend", "triton"]
    parsed = launch.parse([*given, "--granikv-off"], has_gpu=True)
    assert parsed.config is None
    assert list(parsed.sglang_args) == given


def test_off_loads_every_plugin_but_ours():
    env: dict[str, str] = {}
    launch.without_plugin(env)
    names = env["SGLANG_PLUGINS"].split(",")
    assert "granikv" not in names
    assert "granikv_cpu" in names
    env = {"SGLANG_PLUGINS": "granikv,other"}
    launch.without_plugin(env)
    assert env["SGLANG_PLUGINS"] == ""


def test_the_attention_backend_a_user_names_is_the_one_wrapped(model, port):
    parsed = parse(model, port, "--attention-backend", "triton")
    assert parsed.config is not None
    assert parsed.config.stock_backend == "triton"
    assert parsed.sglang_args[-4:] == ("--attention-backend", "granikv", "--radix-cache-backend", "granikv")


def test_a_cpu_gets_a_device_and_a_bounded_pool(model, port):
    args = parse(model, port, has_gpu=False).sglang_args
    assert (args[args.index("--device")], args[args.index("--device") + 1]) == ("--device", "cpu")
    assert args[args.index("--max-total-tokens") + 1] == str(launch.CPU_POOL_TOKENS)
    assert "--sleep-on-idle" in args
    sized = parse(model, port, "--max-total-tokens", "4096", has_gpu=False).sglang_args
    assert sized.count("--max-total-tokens") == 1


def test_a_missing_model_is_named(tmp_path, port):
    assert "does not exist" in refusal("--model-path", str(tmp_path / "nope"), "--port", port)
    assert "config.json" in refusal("--model-path", str(tmp_path), "--port", port)


def test_a_taken_port_is_named(model):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = str(holder.getsockname()[1])
        assert f"port {taken}" in refusal("--model-path", model, "--port", taken)


def test_an_unknown_flag_of_ours_and_a_foreign_cache_are_refused(model, port):
    assert "--granikv-fast" in refusal("--model-path", model, "--port", port, "--granikv-fast")
    text = refusal("--model-path", model, "--port", port, "--radix-cache-backend", "flexkv")
    assert "--radix-cache-backend flexkv" in text


def test_options_are_checked_before_the_embedded_model_is_fetched(monkeypatch):
    monkeypatch.setattr(launch, "_embedded_model", lambda: pytest.fail("fetched a model for a bad command line"))
    assert "--granikv-regime" in refusal("--granikv-regime", "fast")


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--granikv-min-tokens"], "--granikv-min-tokens"),
        (["--granikv-off=yes"], "--granikv-off"),
        (["--port", "http"], "--port"),
        (["--model-path"], "--model-path"),
    ],
)
def test_a_malformed_flag_is_named_in_one_line(argv, flag):
    assert flag in refusal(*argv)


def test_main_prints_one_line_and_returns_two(capsys):
    assert launch.main(["--granikv-min-sharers", "0"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("granikv: --granikv-min-sharers")
    assert captured.out == ""
