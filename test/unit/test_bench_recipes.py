"""Every recipe is a command line that the benchmark takes, and is in the documentation."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from granikv_sglang.bench_serving import app

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "benchmark" / "recipes").glob("*.sh"))
STUB = """#!/usr/bin/env bash
if [ "$1" = -m ]; then printf '%s\\0' "$@" END >> "$RECORD"; elif [ "$1" != -c ]; then test -f "$1"; fi
"""


def commands_of(recipe: Path, tmp_path: Path, *args: str, **env: str) -> list[list[str]]:
    """The benchmark's command lines that a recipe runs, taken down by a stand-in for Python."""
    stub, record = tmp_path / "python", tmp_path / "record"
    stub.write_text(STUB)
    stub.chmod(0o755)
    record.touch()
    own = {
        "PYTHON": str(stub),
        "RECORD": str(record),
        "OUT": str(tmp_path),
        "SMOKE_DIR": str(tmp_path / "smoke"),
        **env,
    }
    done = subprocess.run(["bash", str(recipe), *args], env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines: list[list[str]] = [[]]
    for word in record.read_text().split("\0")[:-1]:
        if word == "END":
            lines.append([])
        else:
            lines[-1].append(word)
    return lines[:-1]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_says_what_it_measures_and_can_be_run(recipe):
    text = recipe.read_text().splitlines()
    assert text[0] == "#!/usr/bin/env bash" and text[1].startswith("# ")
    assert os.access(recipe, os.X_OK)
    assert f"`{recipe.name}`" in (ROOT / "docs" / "benchmarking.md").read_text()


COMPARISONS = {
    "smoke": (6, 2),
    "h200_grid": (15, 2),
    "h200_heterogeneous": (2, 4),
    "h200_forest": (1, 2),
    "h200_straggler": (1, 2),
    "h200_fanout": (1, 2),
    "h200_none": (1, 2),
    "h200_rounds": (1, 2),
    "h200_shapes": (7, 2),
    "h200_decomposition": (8, 12),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_recipe_is_a_command_line_that_is_taken(name, tmp_path):
    """Points and sides of all its comparisons; loads are built, nothing is started."""
    lines = commands_of(ROOT / "benchmark" / "recipes" / f"{name}.sh", tmp_path)
    assert all(line[:2] == ["-m", "granikv_sglang.bench_serving"] for line in lines)
    jobs = [app.planned(line[2:]) for line in lines]
    assert (sum(len(job.points) for job in jobs), sum(len(job.sides) for job in jobs)) == COMPARISONS[name]
    for job in jobs:
        assert job.options.repetitions >= 3
        assert "--granikv-off" in job.sides[0].args


def test_one_load_of_the_decomposition(tmp_path):
    recipe = ROOT / "benchmark" / "recipes" / "h200_decomposition.sh"
    (line,) = commands_of(recipe, tmp_path, "hot", LOADS="heterogeneous")
    (point,) = app.planned(line[2:]).points
    assert point.name.startswith("heterogeneous 128")


def test_servers_that_run_are_used(tmp_path):
    urls = {"STOCK_URL": "http://127.0.0.1:1", "GRANIKV_URL": "http://127.0.0.1:2"}
    recipe = ROOT / "benchmark" / "recipes" / "h200_none.sh"
    (line,) = commands_of(recipe, tmp_path, "--repetitions", "4", **urls)
    job = app.planned(line[2:])
    assert [side.url for side in job.sides] == [*urls.values()]
    assert job.options.repetitions == 4


@pytest.mark.parametrize("name", ["cpu_decode", "h200_engine_decode", "h200_kernels"])
def test_other_recipes_run_scripts_that_exist(name, tmp_path):
    assert commands_of(ROOT / "benchmark" / "recipes" / f"{name}.sh", tmp_path) == []
