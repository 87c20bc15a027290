"""The documentation says what the code does: generated parts, links, commands, the size of README's first screen."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from sglang.srt.server_args import ServerArgs

from granikv_sglang.config import GraniKVConfig, add_cli_args
from granikv_sglang.core import Decline, GraniKVError, Reason
from granikv_sglang.plugin import checks, front, hooks
from support.benchmarks import benchmark

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


docs_tables = benchmark("docs_tables")
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, the way GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", docs_tables.FILES)
def test_generated_parts_are_up_to_date(name):
    current = docs_tables.path_of(name).read_text()
    assert docs_tables.filled(name) == current, "run: python benchmark/docs_tables.py"


def test_check_says_which_file_is_out_of_date(tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    page.write_text("<!-- generated: refused-flags -->\nold\n<!-- end: refused-flags -->\n")
    monkeypatch.setattr(docs_tables, "ROOT", tmp_path)
    assert docs_tables.main(["readme", "--check"]) == 1
    assert "old" in page.read_text()
    assert docs_tables.main(["readme"]) == 0
    assert "--page-size" in page.read_text()
    assert docs_tables.main(["readme", "--check"]) == 0
    assert "README.md: out of date" in capsys.readouterr().out


def test_no_line_of_the_hand_written_tables_is_left_over():
    assert set(docs_tables.WITHOUT_HOOK) == {hook.handler for hook in (*hooks.TABLE, *front.FRONT_TABLE)}
    assert set(docs_tables.WHY_REFUSED) == {attribute for attribute, *_ in checks._REFUSED}
    assert set(docs_tables.ADVICE) == {member.value for enum in (Reason, Decline) for member in enum}


def test_a_row_without_its_line_is_an_error(monkeypatch):
    monkeypatch.setattr(docs_tables, "ADVICE", {})
    with pytest.raises(SystemExit, match="not_decode"):
        docs_tables.reasons()


def configured(**values: Any) -> GraniKVConfig:
    return GraniKVConfig(**values)


RANGED = [f for f in dataclasses.fields(GraniKVConfig) if f.type == "int"]


@pytest.mark.parametrize("field", RANGED, ids=lambda field: field.name)
def test_the_range_in_the_docs_is_the_one_that_is_checked(field):
    low, high = map(int, docs_tables.option_range(field).split(" to "))
    for good in (low, high):
        configured(**{field.name: good})
    for bad in (low - 1, high + 1):
        with pytest.raises(GraniKVError):
            configured(**{field.name: bad})


@pages
def test_relative_links_resolve(page):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} does not exist"
        assert file.is_relative_to(ROOT), f"{target} leaves the repository"
        if anchor:
            assert anchor in anchors(file), f"no heading for {target}"


def code_of(page: Path) -> str:
    """Fenced blocks and inline code of a page."""
    text = page.read_text()
    return "\n".join([*FENCE.findall(text), *re.findall(r"`([^`\n]+)`", FENCE.sub("", text))])


@pages
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in re.findall(r"(?:^|&& |; )make ((?:[a-z][a-z-]*(?: |$))+)", code_of(page), re.MULTILINE):
        unknown = set(line.split()) - targets
        assert not unknown, f"make {line} names {unknown}"


@pages
def test_modules_and_scripts_exist(page):
    code = code_of(page)
    for module in re.findall(r"python -m ([\w.]+)", code):
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"python -m {module}"
        if spec.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{module}.__main__"), f"python -m {module} has no __main__"
    for script in re.findall(r"python ([\w./-]+\.py)", code):
        assert (ROOT / script).is_file(), f"python {script}"


@pages
def test_files_named_in_code_exist(page):
    """Paths from the repository root, or from the overlay's package as the docs abbreviate them."""
    roots = (ROOT, ROOT / "python" / "granikv_sglang")
    for path in re.findall(r"`((?:[\w-]+/)+(?:[\w-]+\.py)?)`", FENCE.sub("", page.read_text())):
        assert any((root / path).exists() for root in roots), path


@pages
def test_flags_of_ours_exist(page):
    known = {f.metadata["flag"] for f in dataclasses.fields(GraniKVConfig)} | {"--granikv-off"}
    for flag in re.findall(r"--granikv-[a-z]+(?:-[a-z]+)*", page.read_text()):
        assert flag in known, flag


GUIDES = ("quickstart", "concepts", "sharing", "state", "operations", "troubleshooting", "configuration")


@pytest.mark.parametrize("guide", GUIDES)
def test_flags_a_guide_names_are_flags_of_the_server(guide):
    """Renamed in a new SGLang: then the page that names it is wrong."""
    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    named = set(re.findall(r"`(--[a-z][\w-]*[a-z])[ `]", (ROOT / "docs" / f"{guide}.md").read_text()))
    assert named - known == set()


def test_entry_points_named_in_the_docs_are_the_declared_ones():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    text = (ROOT / "docs" / "upstream.md").read_text()
    for group, points in declared.items():
        for name, target in points.items():
            row = next(line for line in text.splitlines() if f"`{group}`" in line and f"`{name}`" in line)
            assert f"`{target.removeprefix('granikv_sglang.')}`" in row


def test_readme_comes_to_the_first_answer_in_twelve_lines():
    text = (ROOT / "README.md").read_text()
    block = FENCE.search(text)
    assert block is not None
    lines = block[0].splitlines()[1:-1]
    assert len(lines) <= 12
    assert any(line.startswith("make demo") for line in lines)
    first_screen = text.split("\n---\n")[0].splitlines()
    assert len(first_screen) <= 50
    for heading in ("## First answer", "## What is measured", "## Folders"):
        assert heading in first_screen
    assert "**It does not help**" in "\n".join(first_screen)


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "img").glob("*.svg")), ids=lambda picture: picture.name)
def test_pictures_are_well_formed_and_know_dark_mode(picture):
    root = ElementTree.parse(picture).getroot()
    assert root.get("role") == "img"
    assert "prefers-color-scheme: dark" in picture.read_text()
