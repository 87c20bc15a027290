"""What a finished model folder holds: sizes and hashes of its files, and whether the disk still agrees.

Two files beside the model make this cheap. The manifest is written last by whoever made the folder, so a folder without
one is unfinished. The stamp is written after a full hash check and records the size and modification time of each file;
while those stand, later starts compare sizes only and need not read half a gigabyte again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST_NAME = "granikv-manifest.json"
STAMP_NAME = ".granikv-verified"
_FORMAT = 1


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, source: str) -> None:
    """Record size (bytes) and SHA-256 of each file in `folder`, as made from `source`. Raises OSError."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (MANIFEST_NAME, STAMP_NAME)
    }
    content = {"format": _FORMAT, "source": source, "files": files}
    (folder / MANIFEST_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def find_damage(folder: Path, *, verify: bool = False) -> str | None:
    """Say what is wrong with a model folder, or None when it is complete.

    Sizes are compared always. Hashes are compared with `verify`, and otherwise once: while no stamp says that these
    very files were checked before. A passed hash check leaves that stamp, where the folder can be written. Never raises
    for a damaged folder, whatever the damage is.
    """
    files, damage = _read_manifest(folder)
    if damage is not None:
        return damage
    try:
        for name, (size, _) in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if not verify and _stamp_holds(folder, files):
            return None
        for name, (_, digest) in files.items():
            if sha256_of(folder / name) != digest:
                return f"{name} does not match its SHA-256"
    except OSError as error:
        return f"it cannot be read: {error}"
    _write_stamp(folder, files)
    return None


def is_complete(folder: Path, *, verify: bool = False) -> bool:
    """Whether `folder` is a whole, undamaged model folder (see `find_damage`)."""
    return find_damage(folder, verify=verify) is None


def _read_manifest(folder: Path) -> tuple[dict[str, tuple[int, str]], str | None]:
    """The manifest as {name: (size, digest)}, and what is wrong with it if anything is."""
    try:
        content = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{MANIFEST_NAME} is missing"
    except (OSError, ValueError) as error:
        return {}, f"{MANIFEST_NAME} cannot be read: {error}"
    try:
        if content["format"] != _FORMAT:
            return {}, f"{MANIFEST_NAME} is of format {content['format']}, not {_FORMAT}"
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in content["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}, f"{MANIFEST_NAME} is malformed"
    return files, None if files else f"{MANIFEST_NAME} lists no files"


def _fingerprint(folder: Path, files: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    """What changes when any file, or the manifest, is written again."""
    stats = {name: (folder / name).stat() for name in files}
    return {
        "manifest": sha256_of(folder / MANIFEST_NAME),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
    }


def _stamp_holds(folder: Path, files: Mapping[str, tuple[int, str]]) -> bool:
    try:
        stamp = json.loads((folder / STAMP_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(stamp == _fingerprint(folder, files))


def _write_stamp(folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
    # A cache shared read-only cannot keep a stamp: it pays for the hash check on each start, and that is all.
    try:
        (folder / STAMP_NAME).write_text(json.dumps(_fingerprint(folder, files)), encoding="utf-8")
    except OSError:
        return
