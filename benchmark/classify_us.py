"""Host time of one classification, by groups: work, predictions, the choice, from the features of the pass.

Usage: PYTHONPATH=python:kernels python benchmark/classify_us.py

Least of many short rounds, since other processes disturb. Every group has a length of its own. "new": the batch's
members have changed, so its tiles are counted; "same": only private tails have grown since. Reading the features from
the items is part of the plan that a change of membership builds (``host_plan.py``), and shown beside. Target: 20 us at
64 groups.
"""

from __future__ import annotations

import dataclasses
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from granikv_sglang.core import Regime
from granikv_sglang.plan import Classifier, Decision, Features, Item, Kind, Machine, Shape, Standing, analytic

GROUPS, MEMBERS = (1, 8, 64), 4
ROUNDS, CALLS = 400, 20
SHAPE = Shape(32, 8, 128, 2, 32)
STANDING = Standing(Regime.BATCHED_GEMM, 99)


@dataclass
class Batch:
    """One batch under one classifier, in the steady state."""

    items: tuple[Item, ...]
    tokens: int
    classifier: Classifier

    def read(self) -> Features:
        """Reading the features from the items."""
        rows, longest = len(self.items) * MEMBERS, self.items[-1].tokens
        self.features = Features.of(self.items, longest, rows, SHAPE, self.tokens)
        return self.features

    def prepare(self) -> None:
        """Features of which nothing is counted yet, one for each call of a round."""
        self.unseen = [self.read() for _ in range(CALLS)]

    def new(self) -> Decision:
        """What weighing the regimes costs when membership has changed."""
        return self.classifier.classify(self.unseen.pop(), STANDING)

    def same(self) -> Decision:
        """What weighing the regimes again costs, when only private tails have grown."""
        return self.classifier.classify(self.features.grown(self.tokens + 7), STANDING)


def least_us(call: Callable[[], Any], before_each_round: Callable[[], None] = lambda: None) -> float:
    return min(timeit.repeat(call, before_each_round, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


def main() -> None:
    base = analytic(Machine(Kind.CUDA, 132))
    regimes = {"two regimes": (Regime.BATCHED_GEMM,), "three regimes": (Regime.CASCADE, Regime.BATCHED_GEMM)}
    header = " ".join(f"{name:>14s}" for name in regimes)
    print(f"{'groups':>6s}  {'membership':<10s} {header} {'features':>14s}  us")
    for groups in GROUPS:
        rows = [tuple(range(i * MEMBERS, (i + 1) * MEMBERS)) for i in range(groups)]
        items = tuple(Item(i << 16, 1000 + 137 * i, rows[i], i) for i in range(groups))
        tokens = int(np.sum([item.tokens * MEMBERS for item in items])) + 200 * groups * MEMBERS
        times: dict[str, list[float]] = {"new": [], "same": []}
        for chosen in regimes.values():
            batch = Batch(items, tokens, Classifier(dataclasses.replace(base, regimes=chosen)))
            times["new"].append(least_us(batch.new, batch.prepare))
            times["same"].append(least_us(batch.same))
        read = least_us(batch.read)
        for membership, found in times.items():
            shown = f"{read:14.1f}" if membership == "new" else ""
            print(f"{groups:6d}  {membership:<10s} " + " ".join(f"{us:14.1f}" for us in found) + " " + shown)


if __name__ == "__main__":
    main()
