"""Two real servers for the whole test session: GraniKV under stress, and stock SGLang to compare with.

The GraniKV server has a pool so small that it must evict, SGLang's own switch that forces retraction, SGLang's strict
pool check while busy, and our audit at every scheduler step. Any slot that goes astray ends it, and with it the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from granikv_sglang.embedded import ensure_model
from granikv_sglang.server.process import Server, free_ports, serving

POOL_TOKENS = 2048
STRESS = {
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "17",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def model() -> Path:
    return ensure_model(progress=False)


@pytest.fixture(scope="session")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """``(granikv, stock)``, started side by side because a start is mostly imports."""
    folder = tmp_path_factory.mktemp("servers")
    ports = free_ports(2)
    common = ["--model-path", str(model), "--max-running-requests", "16", "--chunked-prefill-size", "256"]
    # One thread each: with two on two cores every parallel region waits for whoever else is running, and decode is
    # thousands of tiny ones. Speed is not what is tested here.
    os.environ["OMP_NUM_THREADS"] = "1"
    saved = {name: os.environ.get(name) for name in STRESS}
    os.environ.update(STRESS)
    granikv = Server(
        "granikv",
        ports[0],
        [
            *common,
            "--max-total-tokens",
            str(POOL_TOKENS),
            "--granikv-min-tokens",
            "64",
            "--granikv-audit",
            "--enable-metrics",
            "--enable-cache-report",
        ],
        folder,
    )
    for name, value in saved.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    stock = Server("stock", ports[1], [*common, "--max-total-tokens", "32768", "--granikv-off"], folder)
    with serving(granikv, stock):
        yield granikv, stock


@pytest.fixture(scope="session")
def everyday(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server as a person would start it, for the page, the examples and the commands of the documentation."""
    os.environ["OMP_NUM_THREADS"] = "1"
    (port,) = free_ports(1)
    flags = ["--model-path", str(model), "--max-total-tokens", "16384", "--enable-metrics", "--enable-cache-report"]
    server = Server("everyday", port, flags, tmp_path_factory.mktemp("everyday"))
    with serving(server):
        yield server


@pytest.fixture(scope="session")
def granikv(servers: tuple[Server, Server]) -> Server:
    return servers[0]


@pytest.fixture(scope="session")
def stock(servers: tuple[Server, Server]) -> Server:
    return servers[1]
