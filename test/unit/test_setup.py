"""The set-up files: pins, targets, the CI entry's honesty, and that nothing committed names a package index."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
PYTHONS = ("3.11", "3.12")
PIN = re.compile(r"^[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+( ; .+)?$")
# Put together here, so that this file does not name them either.
INDEX_HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("pypi", "nvidia", "com"),
        ("download", "pytorch", "org"),
        ("anaconda", "org"),
        ("npmjs", "org"),
        ("crates", "io"),
        ("docker", "io"),
        ("ghcr", "io"),
        ("nvcr", "io"),
        ("quay", "io"),
        ("proxy", "golang", "org"),
    )
]


def locked(python: str) -> dict[str, str]:
    """What the lock installs on Linux x86_64 with this Python: {name: version}."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.7",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    versions: dict[str, str] = {}
    for line in LOCK.read_text().splitlines():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name not in versions, f"{name} is pinned twice for Python {python}"
            versions[name] = str(requirement.specifier).removeprefix("==")
    return versions


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(text) for text in project["dependencies"] + extras["dev"] + extras["bench"]]


def test_lock_holds_exact_pins_and_nothing_else() -> None:
    assert [line for line in LOCK.read_text().splitlines() if not PIN.match(line)] == []


def test_lock_names_no_place() -> None:
    text = LOCK.read_text()
    assert [mark for mark in ("://", "@", "/", "--", "#") if mark in text] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_lock_covers_what_pyproject_declares(python: str) -> None:
    versions = locked(python)
    assert versions["sglang"] == "0.5.17"
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{name} is not locked: run make lock"
        assert requirement.specifier.contains(versions[name], prereleases=True), f"{requirement} but {versions[name]}"


@pytest.mark.parametrize("python", PYTHONS)
def test_lock_builds_the_project_without_a_build_environment(python: str) -> None:
    """make setup installs this project with --no-build-isolation, so its build backend must be locked too."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for requirement in map(Requirement, needs):
        assert requirement.specifier.contains(locked(python)[requirement.name])


def test_no_committed_file_names_an_index() -> None:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    named = []
    for name in filter(None, listing.stdout.decode().split("\0")):
        path = ROOT / name
        content = path.read_bytes().lower() if path.is_file() else b""
        named += [(name, host) for host in INDEX_HOSTS if host.encode() in content]
    assert named == []


# --- make ------------------------------------------------------------------------------------------------------------


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # What an outer `make test` exports must not steer the inner one.
    env = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS")
    }
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


def test_make_alone_lists_the_targets() -> None:
    listing = make().stdout
    for target in [
        "setup",
        "demo",
        "serve",
        "test",
        "test-gpu",
        "lint",
        "fmt",
        "bench-cpu",
        "bench-smoke",
        "lock",
        "clean",
    ]:
        assert re.search(rf"^  make {target} +\S", listing, re.MULTILINE), target


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("demo", "-m granikv_sglang.demo --x"),
        ("serve", "-m granikv_sglang.launch_server --x"),
        ("test", '-m pytest -m "not gpu" --x'),
        ("test-gpu", "-m pytest -m gpu --x"),
        ("bench-cpu", "benchmark/bench_cpu.py --x"),
    ],
)
def test_target_builds_the_environment_and_runs_its_program(tmp_path: Path, target: str, command: str) -> None:
    plan = make("-n", target, "ARGS=--x", f"VENV={tmp_path}/venv").stdout
    assert f"{tmp_path}/venv/bin/python {command}" in plan
    assert "pip install" in plan and "requirements.lock" in plan


def test_no_python_is_one_clear_line(tmp_path: Path) -> None:
    result = make("setup", f"VENV={tmp_path}/venv", "PYTHON=/nonexistent/python")
    assert result.returncode != 0
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert "no Python 3.11 or 3.12 found" in first
    assert len(rest) == 1 and rest[0].startswith("make: ***")


@pytest.mark.parametrize("status", [0, 1, 2])
def test_ci_entry_reports_the_status_of_make(tmp_path: Path, status: int) -> None:
    summary = "==== 3 passed, 1 deselected in 0.10s ===="
    stand_in = tmp_path / "make"
    stand_in.write_text(f"#!/bin/sh\necho \"$@\"\necho '{summary}'\necho afterwards\nexit {status}\n")
    stand_in.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run([ROOT / ".ci" / "run"], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == status
    lines = result.stdout.splitlines()
    assert lines[0] == "-k browser lint test"
    assert lines[-2] == summary
    assert lines[-1].startswith("CI: ok" if status == 0 else "CI: failed")
