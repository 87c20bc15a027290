"""Two tensor-parallel ranks over gloo on the CPU: the ranks decide alike, and answers equal those of one stock rank."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from granikv_sglang.calibrate.__main__ import main as calibrate
from granikv_sglang.plan import analytic
from granikv_sglang.plan.table import load, save
from granikv_sglang.plugin.engines import device_of
from granikv_sglang.server.process import Server, free_ports, serving
from support.load import Request, compare, run
from support.tiny import VOCABULARY, tiny_model

NEW_TOKENS = 40


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    folder = tmp_path_factory.mktemp("tensor_parallel")
    model = str(tiny_model(folder / "model"))
    common = ["--model-path", model, "--skip-tokenizer-init", "--max-running-requests", "12"]
    ports = free_ports(2)
    ours = ["--tp", "2", "--max-total-tokens", "1536", "--granikv-min-tokens", "48", "--granikv-audit"]
    granikv = Server("granikv-tp2", ports[0], [*common, *ours], folder)
    stock = Server("stock", ports[1], [*common, "--max-total-tokens", "16384", "--granikv-off"], folder)
    with serving(granikv, stock):
        yield granikv, stock


def requests() -> list[Request]:
    """Two groups with two levels each, and outsiders; more than the pool of the first server holds at once."""
    rng = random.Random(5)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY - 2) for _ in range(count))

    made = []
    for group in "ab":
        team, role = ids(150), ids(60)
        made += [
            Request(f"{group}{i}", group, (*team, *(role if i % 3 else ()), *ids(9)), NEW_TOKENS) for i in range(9)
        ]
    made += [Request(f"out{i}", "none", ids(200), NEW_TOKENS) for i in range(6)]
    rng.shuffle(made)
    return made


def team(number: int) -> list[Request]:
    """A group of its own, small enough for every prefix of it to find room in an empty pool."""
    rng = random.Random(100 + number)
    prefix = tuple(rng.randrange(VOCABULARY - 2) for _ in range(150))
    return [Request(f"team{number}-{i}", "team", (*prefix, 7 + i), NEW_TOKENS) for i in range(8)]


def test_two_ranks_answer_as_one_stock_rank(pair):
    granikv, stock = pair
    wanted = requests()
    ours = run(granikv, wanted, gap=0.05)
    result = compare(ours, run(stock, wanted))
    assert result.wrong == ()
    assert result.equal >= 20
    # How many of those prefixes were promoted depends on who met whom in a full pool; these meet, and have room.
    for number in range(2):
        granikv.post("/flush_cache?timeout=60", parse=False)
        before = granikv.granikv_state()["counters"]["promotions"]
        assert compare(run(granikv, team(number)), run(stock, team(number))).wrong == ()
        assert granikv.granikv_state()["counters"]["promotions"] > before
    counters = granikv.granikv_state()["counters"]
    assert counters["promotions"] >= 2
    assert counters["shared_steps"] > 20
    assert counters["hot_prefill_tokens"] > 0
    # Ranks compare a hash of their decisions every 32 passes; one that differed would have ended the server.
    passes = sum(count for reasons in counters["steps"].values() for count in reasons.values())
    assert passes > 64
    assert counters["rank_comparisons"] >= passes // 32 + counters["promotions"]
    assert granikv.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}})


def test_the_all_reduce_between_two_ranks_is_measured(tmp_path):
    """Two processes over gloo, joined as SGLang's workers are; the constants go into a calibration."""
    device, path = device_of(False), tmp_path / "calibration.json"
    save(path, device, analytic(device.machine), {})
    assert calibrate(["--tp", "2", "--device", "cpu", "--out", str(path)]) == 0
    constants, about = load(path, device)
    assert about["link"]["tp"] == 2
    assert constants.link != analytic(device.machine).link
    assert 1 < constants.link.us < 1e5
    assert all(us > 0 for _, us in about["link"]["bytes_us"])
