"""Does a long-lived server get slower? CPU time a request before and after 10,000 random ones, SGLang's own scheduler.

``python benchmark/churn.py [--requests N]``. The two-layer model of the tests makes the model's share small, so that
what grows in the cache layer would show. CPU time of the process, not the wall clock: its neighbours do not count.
Results: ``benchmark/results/churn.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test"))

from granikv_sglang.core import commit  # noqa: E402
from support.inprocess import Driver  # noqa: E402  (the tests' driver, found by the line above)
from support.tiny import tiny_model  # noqa: E402

PROBE_GROUPS, PROBE_MEMBERS, PROBE_NEW = 4, 8, 16
REPETITIONS = 7
WARM = 300


class Load:
    """Random multi-agent requests with texts nobody has sent before, and a probe that is the same work each time."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.rng = random.Random(1)

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(400) for _ in range(count)]

    def probe(self) -> float:
        """CPU milliseconds a request of fresh groups of eight on 200 tokens."""
        requests = []
        for _ in range(PROBE_GROUPS):
            prefix = self.words(200)
            requests += [self.driver.request([*prefix, 401 + i], PROBE_NEW) for i in range(PROBE_MEMBERS)]
        begin = time.process_time()
        self.driver.answer(*requests)
        return 1000 * (time.process_time() - begin) / len(requests)

    def churn(self, count: int, progress: Any) -> None:
        """Groups of one to eight, prefixes of 20 to 500 tokens, some aborted, some on half of a prefix."""
        sent: list[Any] = []
        while count > 0:
            batch = []
            for _ in range(self.rng.randint(1, 3)):
                prefix = self.words(self.rng.randint(20, 500))
                for i in range(min(count - len(batch), self.rng.randint(1, 8))):
                    cut = len(prefix) if self.rng.random() < 0.9 else self.rng.randint(1, len(prefix))
                    batch.append(self.driver.request([*prefix[:cut], 401 + i], self.rng.randint(2, 16)))
            aborts = [self.driver.abort(r) for r in self.rng.sample(sent, min(len(sent), 1))]
            self.driver.turn(*batch, *aborts)
            while len(self.driver.scheduler.waiting_queue) > 8:
                self.driver.turn()
            sent = batch
            count -= len(batch)
            progress.update(len(batch))
            self.driver.reqs.clear()
            self.driver.sent.clear()
        self.driver.settle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="requests between the two measurements")
    requests = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as folder:
        driver = Driver(tiny_model(Path(folder)), ["--max-total-tokens", "8192"], strict=False)
    load = Load(driver)
    with tqdm(total=WARM + requests, unit="request") as progress:
        # The pool is full of old prefixes from here on, as a server's is: an empty one evicts nothing.
        load.churn(WARM, progress)
        load.probe()
        before = [load.probe() for _ in range(REPETITIONS)]
        run_before = driver.tree.allocator.largest_free_run()
        load.churn(requests, progress)
        after = [load.probe() for _ in range(REPETITIONS)]
    run_after = driver.tree.allocator.largest_free_run()
    assert driver.flush()
    free = driver.tree.allocator.available_size()
    assert free == driver.tree.allocator.size, "slots were lost"
    counters = driver.counters.as_dict()
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": platform.processor() or platform.machine(),
        "requests": requests,
        "cpu_ms_a_request_before": [round(x, 3) for x in before],
        "cpu_ms_a_request_after": [round(x, 3) for x in after],
        "throughput_after_over_before": round(statistics.median(before) / statistics.median(after), 4),
        "largest_free_run": [run_before, run_after],
        **{k: counters[k] for k in ("promotions", "hot_splits", "hot_evictions", "room_evictions")},
        "declines": counters["declines"],
    }
    path = ROOT / "benchmark" / "results" / "churn.jsonl"
    with path.open("a") as out:
        out.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=2))
    driver.stop()


if __name__ == "__main__":
    main()
