"""The launcher: our flags on top of SGLang's, checked before anything heavy starts."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from granikv_sglang.config import NAME, GraniKVConfig, add_cli_args, from_args
from granikv_sglang.core import GraniKVError

CPU_POOL_TOKENS = 65536
"""KV pool on a CPU when the user names no size. SGLang would take most of the machine's memory; this is 3 GB for the
embedded model in float32."""

PLUGIN_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")


@dataclass(frozen=True)
class Launch:
    """A checked command line: GraniKV's options (None when off) and the arguments that go to SGLang."""

    config: GraniKVConfig | None
    sglang_args: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are refusals like all others: one line that names the flag."""

    def error(self, message: str) -> NoReturn:
        raise GraniKVError(f"{message.removeprefix('argument ')}; --help lists all flags")


def parse(argv: Sequence[str], *, has_gpu: bool) -> Launch:
    """Split a command line into GraniKV's options and SGLang's arguments, defaults filled in.

    Raises GraniKVError with one readable line on a bad value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_cli_args(parser)
    ours, rest = parser.parse_known_args(list(argv))
    unknown = [arg for arg in rest if arg.startswith("--granikv")]
    if unknown:
        raise GraniKVError(f"{unknown[0]} is not a flag of GraniKV; --help lists them")
    config = from_args(ours)
    peek = _peek(rest)
    if peek.model_path is None:
        rest = ["--model-path", str(_embedded_model()), *rest]
    else:
        _check_model(peek.model_path)
    _check_port(peek.host, peek.port)
    if not has_gpu:
        rest = [*rest, *_cpu_defaults(peek)]
    if ours.off:
        return Launch(None, tuple(rest))
    if peek.attention_backend not in (None, NAME):
        # With GraniKV on, the backend a user names is the one to wrap.
        config = replace(config, stock_backend=peek.attention_backend)
    if peek.radix_cache_backend not in (None, NAME):
        raise GraniKVError(
            f"--radix-cache-backend {peek.radix_cache_backend} excludes GraniKV's own; drop it or add --granikv-off"
        )
    return Launch(config, (*rest, "--attention-backend", NAME, "--radix-cache-backend", NAME))


def _peek(args: Sequence[str]) -> argparse.Namespace:
    """The few SGLang arguments the launcher must know; everything stays in ``args`` for SGLang itself."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model", default=None)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--device", default=None)
    parser.add_argument("--attention-backend", default=None)
    parser.add_argument("--radix-cache-backend", default=None)
    parser.add_argument("--max-total-tokens", default=None)
    parser.add_argument("--mem-fraction-static", default=None)
    return parser.parse_known_args(list(args))[0]


def _embedded_model() -> Path:
    # Imports transformers, seconds: only when the embedded model is what is served.
    from granikv_sglang.embedded import EmbeddedModelError, ensure_model  # noqa: PLC0415

    try:
        folder = ensure_model()
    except EmbeddedModelError as error:
        raise GraniKVError(str(error)) from error
    print(f"granikv: no --model-path given, serving the embedded model {folder.name}", file=sys.stderr)
    return folder


def _check_model(path: str) -> None:
    """A local path must exist; anything else is a hub name and SGLang's to resolve."""
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") != 1
    folder = Path(path).expanduser()
    if folder.exists():
        if folder.is_dir() and not (folder / "config.json").exists():
            raise GraniKVError(f"--model-path {path} has no config.json; name a folder that holds a Hugging Face model")
    elif looks_local:
        raise GraniKVError(
            f"--model-path {path} does not exist; name a model folder, or leave it out for the embedded one"
        )


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OverflowError as error:
            raise GraniKVError(f"--port {port} is not a port; choose 1 to 65535") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise GraniKVError(
                    f"port {port} on {host} is taken, another server may be running; stop it or choose --port"
                ) from error
            raise GraniKVError(f"cannot listen on --host {host} --port {port}: {error.strerror}") from error


def _cpu_defaults(peek: argparse.Namespace) -> list[str]:
    # An idle SGLang scheduler polls without a pause: with a model on the same few cores that is a core lost.
    extra = ["--sleep-on-idle", *([] if peek.device else ["--device", "cpu"])]
    if peek.max_total_tokens is None and peek.mem_fraction_static is None:
        extra += ["--max-total-tokens", str(CPU_POOL_TOKENS)]
    return extra


def without_plugin(env: MutableMapping[str, str]) -> None:
    """Let SGLang load every installed plug-in but GraniKV's own: nothing of it then runs in any process."""
    names = {point.name for group in PLUGIN_GROUPS for point in entry_points(group=group)} - {NAME}
    allowed = {name.strip() for name in env.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    env["SGLANG_PLUGINS"] = ",".join(sorted(names & allowed if allowed else names))


def print_help() -> None:
    """Our group first, then SGLang's flags: one parser would put its hundreds of flags before ours."""
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    ours = argparse.ArgumentParser(
        usage="python -m granikv_sglang.launch_server [GraniKV flags] [SGLang flags]",
        description="SGLang's OpenAI-compatible server with shared-prefix decode. Without --model-path it serves the "
        "embedded model. While it runs, /granikv shows what is shared.",
        add_help=False,
    )
    add_cli_args(ours)
    theirs = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    ServerArgs.add_cli_args(theirs)
    print(ours.format_help())
    print("SGLang's flags:")
    print(theirs.format_help())


def main(argv: Sequence[str]) -> int:
    """Run the server; returns the exit code. A refusal is one line on stderr and exit code 2."""
    try:
        if any(arg in ("-h", "--help") for arg in argv):
            print_help()
            return 0
        import torch  # noqa: PLC0415  (a second and more: not before the flags above are known to be good)

        launch = parse(argv, has_gpu=torch.cuda.is_available())
        if launch.config is None:
            without_plugin(os.environ)
        else:
            launch.config.to_env()
        server_args = prepare(launch)
    except GraniKVError as error:
        print(f"granikv: {error}", file=sys.stderr)
        return 2
    return _serve(server_args)


def prepare(launch: Launch) -> Any:
    """SGLang's ServerArgs for a launch, with GraniKV's checks done in this process, before any other starts.

    Raises GraniKVError for everything that can be known before a scheduler is spawned.
    """
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415  (tens of seconds)
    from sglang.srt.server_args import prepare_server_args  # noqa: PLC0415

    load_plugins()
    try:
        server_args = prepare_server_args(list(launch.sglang_args))
    except (OSError, ValueError, RuntimeError, AssertionError, ImportError) as error:
        raise GraniKVError(f"SGLang refuses these arguments: {_first_line(error)}") from error
    if launch.config is not None:
        check_started(server_args)
    return server_args


def check_started(server_args: Any) -> None:
    """The self-check: the plug-in loaded, every hook landed, flags and model are supported. Raises GraniKVError."""
    from sglang.srt.mem_cache.registry import get_radix_cache_factory  # noqa: PLC0415

    factory = get_radix_cache_factory(NAME)
    if factory is None:
        raise GraniKVError(
            "GraniKV's plug-in did not load (SGLang's log above says why); mend that, or start with --granikv-off"
        )
    runtime = factory.__self__
    runtime.require_sound(server_args, server_args.get_model_config())


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _serve(server_args: Any) -> int:
    from sglang.launch_server import run_server  # noqa: PLC0415
    from sglang.srt.utils import kill_process_tree  # noqa: PLC0415

    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0
