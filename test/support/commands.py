"""Every command of the documentation, taken out of its fenced blocks, and the rule by which each is tested."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
URL = "http://127.0.0.1:30000"
"""Where the documentation's server is."""


class How(StrEnum):
    """How a command is tested."""

    RUN = "run"
    """Run as it stands; it must succeed."""
    SERVER = "server"
    """Run as it stands, against the tests' own server."""
    PLAN = "plan"
    """``make -n``: the target exists, and so does everything its recipe names."""
    FLAGS = "flags"
    """Too long or in need of a GPU: the program starts, and its ``--help`` knows every flag of the command."""
    SCRIPT = "script"
    """The script exists, parses, and every program and flag in it does too."""
    ELSEWHERE = "elsewhere"
    """Another test runs it; the rule names that test."""


@dataclass(frozen=True)
class Rule:
    """Commands that match ``pattern`` are tested like this. ``test`` names the test of ELSEWHERE, file::function."""

    pattern: str
    how: How
    test: str = ""


RULES: tuple[Rule, ...] = (
    Rule(r"git clone ", How.ELSEWHERE, "unit/test_setup.py::test_target_builds_the_environment_and_runs_its_program"),
    Rule(r"export GRANIKV_OPTIONS=", How.ELSEWHERE, "integration/test_docs_commands.py::test_options_in_the_docs"),
    Rule(r"sglang serve ", How.ELSEWHERE, "integration/test_server.py::test_sglang_serve_works_with_the_two_names"),
    Rule(r"\.ci/run\b", How.ELSEWHERE, "unit/test_setup.py::test_ci_entry_reports_the_status_of_make"),
    Rule(r"curl -s http://127\.0\.0\.1:30000/", How.SERVER),
    Rule(
        r"python docs/examples/\w+\.py",
        How.ELSEWHERE,
        "integration/test_examples.py::test_an_example_says_something_and_hot_saves_something",
    ),
    Rule(
        r"python -m granikv_sglang\.doctor$",
        How.ELSEWHERE,
        "integration/test_server.py::test_the_doctor_reports_every_hook",
    ),
    Rule(r"python -m granikv_sglang\.doctor --json$", How.RUN),
    Rule(
        r"python benchmark/docs_tables\.py$",
        How.ELSEWHERE,
        "unit/test_docs.py::test_check_says_which_file_is_out_of_date",
    ),
    Rule(r"python -m granikv_sglang\.launch_server --help", How.RUN),
    Rule(r"make( |$)", How.PLAN),
    Rule(r"(?:[A-Z_]+=\S+ )*(?:timeout \d+ )?(?:bash )?benchmark/recipes/\w+\.sh", How.SCRIPT),
    Rule(r"(?:[A-Z_]+=\S+ )*(?:timeout \d+ )?python (?:-m [\w.]+|benchmark/\w+\.py)", How.FLAGS),
)
"""First match counts; a command that matches none fails the tests, so that nobody adds one without a rule."""


@dataclass(frozen=True)
class Command:
    """One command: the page it stands on and its text in one line, ``python`` for the environment's interpreter."""

    page: Path
    text: str

    @property
    def rule(self) -> Rule | None:
        return next((rule for rule in RULES if re.match(rule.pattern, self.text)), None)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text}"


def pages() -> list[Path]:
    """Every page of the documentation."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[Command]:
    """The commands of a page's ``sh`` blocks: comments gone, continued lines joined, ``&&`` taken apart."""
    found = []
    for language, block in FENCE.findall(page.read_text()):
        if language not in ("sh", "bash", "console"):
            continue
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            for part in re.split(r"\s+&&\s+|;\s+", _without_comment(line)):
                text = re.sub(r"(?<![\w/])(?:\.venv/bin/)?python3?(?= )", "python", part.strip().removeprefix("$ "))
                if text and not re.match(r"cd \S+$", text):
                    found.append(Command(page, text))
    return found


def _without_comment(line: str) -> str:
    lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = []
    for word in lexer:
        if word.startswith("#"):
            break
        words.append(word)
    return " ".join(words)


def snippets(page: Path) -> list[str]:
    """The ``python`` blocks of a page."""
    return [block for language, block in FENCE.findall(page.read_text()) if language == "python"]


def flags(text: str) -> list[str]:
    """The long flags of a command, values left out."""
    return re.findall(r"(?<=\s)(--[a-z][\w-]*)", text)


def argv(text: str, python: str, url: str) -> Sequence[str]:
    """The command as arguments, for the interpreter and the server of the tests."""
    words = shlex.split(text.replace(URL, url))
    if words[0] == "python":
        words[0] = python
    return words
