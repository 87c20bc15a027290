"""Host time of one classification, by groups: features from items, work, three predictions, the choice.

Usage: PYTHONPATH=python:kernels python benchmark/classify_us.py

Least of many short rounds, since other processes disturb. Every group has a length of its own. Target: 20 us at 64
groups.
"""

from __future__ import annotations

import dataclasses
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np

from granikv_sglang.core import Regime
from granikv_sglang.plan import Classifier, Features, Item, Kind, Machine, Shape, Standing, analytic

GROUPS, MEMBERS = (1, 8, 64), 4
ROUNDS, CALLS = 400, 20
SHAPE = Shape(32, 8, 128, 2, 32)


def least_us(call: Callable[[], Any]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


def main() -> None:
    base = analytic(Machine(Kind.CUDA, 132))
    regimes = {"two regimes": (Regime.BATCHED_GEMM,), "three regimes": (Regime.CASCADE, Regime.BATCHED_GEMM)}
    print(f"{'groups':>6s} {'features':>9s} " + " ".join(f"{name:>14s}" for name in regimes) + "  us")
    for groups in GROUPS:
        rows = [tuple(range(i * MEMBERS, (i + 1) * MEMBERS)) for i in range(groups)]
        items = tuple(Item(i << 16, 1000 + 137 * i, rows[i], i) for i in range(groups))
        tokens = int(np.sum([item.tokens * MEMBERS for item in items])) + 200 * groups * MEMBERS
        longest = items[-1].tokens

        def features() -> Features:
            return Features.of(items, longest, groups * MEMBERS, SHAPE, tokens)  # noqa: B023  (called in this turn)

        made, standing = features(), Standing(Regime.BATCHED_GEMM, 99)
        times = [least_us(features)]
        for chosen in regimes.values():
            classifier = Classifier(dataclasses.replace(base, regimes=chosen))
            times.append(least_us(lambda c=classifier: c.classify(made, standing)))  # noqa: B023
        print(f"{groups:6d} {times[0]:9.1f} " + " ".join(f"{us:14.1f}" for us in times[1:]))


if __name__ == "__main__":
    main()
