"""Common set-up: the tests' own helpers are importable as ``support``; the order in which folders run."""

import sys
from pathlib import Path

import pytest

TEST = Path(__file__).parent
sys.path.insert(0, str(TEST))

ORDER = ("unit", "property", "kernels", "kernels_cuda", "reliability", "integration")
"""Quick ones first. ``reliability`` runs SGLang's scheduler in this process, with our hooks and SGLang's logging set up
for good: what tests stock code, or our hooks from the outside, has to come before it."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(item.path.relative_to(TEST).parts[0]))
