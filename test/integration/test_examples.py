"""The example programs on the embedded model: a readable result, HOT at work, and one line where there is no server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from granikv_sglang.server.process import free_ports

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "common.py")
SPEAKERS = {
    "debate.py": ["a parent opens", "the treasurer replies", "verdict"],
    "planner.py": ["planner", "worker, for children", "critic"],
    "map_reduce.py": ["1. Why we build", "6. ", "together"],
    "tree_of_thought.py": ["idea, in the brief: ", "out of '"],
    "debate_openai.py": ["round 1, a parent", "round 2, a student", "of them HOT"],
}


def start(program: str, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / program), "--url", url],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_every_example_is_known_here_and_in_the_readme():
    assert sorted(SPEAKERS) == PROGRAMS
    readme = (FOLDER / "README.md").read_text()
    assert all(f"]({program})" in readme and f"docs/examples/{program}\n" in readme for program in PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_says_something_and_hot_saves_something(program, everyday):
    everyday.post("/flush_cache?timeout=30", parse=False)
    done = start(program, everyday.url)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    for speaker in SPEAKERS[program]:
        assert re.search(rf"^{re.escape(speaker)}", done.stdout, re.MULTILINE) or speaker in done.stdout, speaker
    assert "(no answer)" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 120
    saved = done.stdout[done.stdout.index("What HOT saved") :]
    promotions, tokens = re.search(r"made HOT +(\d+) prefixes, ([\d,]+) tokens", saved).groups()
    shared, steps = re.search(r"steps that shared +(\d+) of (\d+)", saved).groups()
    gigabytes = re.search(r"not read again +([\d.]+) GB", saved)[1]
    assert int(promotions) >= 1
    assert int(tokens.replace(",", "")) >= 512
    assert 5 <= int(shared) <= int(steps)
    assert float(gigabytes) > 0


def test_without_a_server_it_is_one_line():
    """All programs connect in the same way."""
    done = start("debate.py", f"http://127.0.0.1:{free_ports(1)[0]}")
    assert done.returncode == 1
    assert re.fullmatch(r"no server at \S+ \(.*\); start one with `make serve`, or give --url\n", done.stderr)
