"""One scheduler for all tests of this folder that drive SGLang's loop; each test starts on an empty cache."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.inprocess import Driver
from support.tiny import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def session_driver(tiny: Path) -> Iterator[Driver]:
    before = dict(os.environ)
    driver = Driver(tiny)
    yield driver
    driver.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def driver(session_driver: Driver) -> Iterator[Driver]:
    session_driver.settle()
    assert session_driver.flush()
    session_driver.let_promote()
    yield session_driver
    session_driver.let_promote()
    session_driver.mend()
    session_driver.settle()
    assert session_driver.flush(), "the scheduler is not idle after the test"
    assert session_driver.tree.allocator.available_size() == session_driver.tree.allocator.size


def words(seed: int, count: int) -> list[int]:
    """Token ids that no other seed begins with."""
    rng = random.Random(seed)
    return [seed % 400, *(rng.randrange(400) for _ in range(count - 1))]
