"""Every command and every Python block of the documentation is run, or tested by the rule that stands for it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from granikv_sglang.config import GraniKVConfig
from support.commands import ROOT, URL, Command, How, argv, commands, flags, pages, snippets

ALL = list({command.text: command for page in pages() for command in commands(page)}.values())


def of(*hows: How) -> pytest.MarkDecorator:
    chosen = [command for command in ALL if command.rule is not None and command.rule.how in hows]
    return pytest.mark.parametrize("command", chosen, ids=str)


def run(words, timeout=300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(words), cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


@cache
def help_of(*program: str) -> str:
    """What a program says about its flags. It must start and end well."""
    done = run([sys.executable, *program, "--help"])
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_command_has_a_rule():
    assert [str(command) for command in ALL if command.rule is None] == []
    assert len(ALL) > 20


@of(How.RUN)
def test_commands_that_stand_alone(command: Command):
    done = run(argv(command.text, sys.executable, URL))
    assert done.returncode == 0, done.stderr[-2000:]


@of(How.SERVER)
def test_commands_that_ask_a_server(command: Command, everyday):
    done = run(argv(command.text, sys.executable, everyday.url))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    if command.text.startswith("curl") and "/metrics" not in command.text:
        assert "error" not in json.loads(done.stdout)


@of(How.PLAN)
def test_make_targets_can_be_planned(command: Command):
    words = [word for word in shlex.split(command.text)[1:] if word != "-n"]
    done = run(["make", "-n", *words], timeout=60)
    assert done.returncode == 0, done.stderr
    given = next((word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")), "")
    program = {"serve": ("-m", "granikv_sglang.launch_server"), "demo": ("-m", "granikv_sglang.demo")}
    for target in set(words) & set(program):
        assert_known(flags(f" {given}"), help_of(*program[target]))


@of(How.FLAGS)
def test_long_commands_start_and_know_their_flags(command: Command):
    found = re.search(r"python (-m [\w.]+|benchmark/\w+\.py)", command.text)
    assert found is not None
    assert_known(flags(command.text), help_of(*found[1].split()))


@of(How.SCRIPT)
def test_scripts_parse(command: Command):
    found = re.search(r"benchmark/recipes/\w+\.sh", command.text)
    assert found is not None
    done = run(["bash", "-n", found[0]])
    assert done.returncode == 0, done.stderr


@of(How.ELSEWHERE)
def test_what_is_tested_elsewhere_is(command: Command):
    assert command.rule is not None
    file, name = command.rule.test.split("::")
    assert f"def {name}(" in (ROOT / "test" / file).read_text()


def test_options_in_the_docs():
    texts = [command.text for command in ALL if command.text.startswith("export GRANIKV_OPTIONS=")]
    assert texts
    for text in texts:
        (value,) = shlex.split(text.partition("=")[2])
        GraniKVConfig.from_env({"GRANIKV_OPTIONS": value})


SNIPPETS = [(page, i) for page in pages() for i in range(len(snippets(page)))]


@pytest.mark.parametrize(("page", "number"), SNIPPETS, ids=lambda value: getattr(value, "name", str(value)))
def test_python_blocks_run(page: Path, number: int, everyday):
    done = run([sys.executable, "-c", snippets(page)[number].replace(URL, everyday.url)])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def assert_known(used: list[str], text: str) -> None:
    known = set(re.findall(r"--[a-z][\w-]*", text))
    assert [flag for flag in used if flag not in known] == []
