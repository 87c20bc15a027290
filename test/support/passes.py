"""Batches, planted constants and timings for tests of the classifier."""

import dataclasses
import random

from granikv_sglang.core import Regime
from granikv_sglang.plan import Features, Item, Kind, Machine, Shape, analytic, coverage_of
from granikv_sglang.plan.cost import predict
from granikv_sglang.plan.fit import Point

H200 = Machine(Kind.CUDA, 132)
LLAMA = Shape(32, 8, 128, layers=32)
SHARED = (Regime.CASCADE, Regime.BATCHED_GEMM)


def features_of(groups, tail=256, shape=LLAMA):
    """``groups`` is (members, tokens) pairs; every request has ``tail`` tokens of its own."""
    items, rows = [], 0
    for i, (members, tokens) in enumerate(groups):
        items.append(Item(i << 20, tokens, tuple(range(rows, rows + members)), i))
        rows += members
    coverage = coverage_of(items, rows)
    return Features.of(items, int(coverage.max()), rows, shape, int(coverage.sum()) + tail * rows)


def with_both(constants, **changes):
    return dataclasses.replace(constants, regimes=SHARED, **changes)


def planted():
    """Constants well away from the analytic ones, under which every regime is the best somewhere."""
    base = analytic(H200)
    return with_both(
        base,
        margin=0.0,
        plain_margin=0.0,
        uniform=dataclasses.replace(base.uniform, launch_us=4.0, hbm=3.1e6, again=6e6, miss=0.4),
        plain=dataclasses.replace(base.plain, launch_us=5.0, hbm=2.8e6, again=5e6, miss=0.3),
        gemm=dataclasses.replace(base.gemm, launch_us=30.0, rate=1e9, hbm=3e6, overhead=3.0, overlap=0.8),
        cascade=dataclasses.replace(base.cascade, launch_us=8.0, rate=4e8, hbm=3.9e6, overhead=2.0, tail=3.5e6),
    )


def measured(features, constants, rng, noise=0.02):
    """What a device with these constants would show, with a disturbance of at most ``noise``."""
    costs = predict(features, constants, SHARED)
    names = (Regime.UNIFORM, *SHARED)
    return {name: cost.us * (1 + noise * rng.uniform(-1, 1)) for name, cost in zip(names, costs, strict=True)}


def points(count, constants, seed=0, noise=0.02):
    rng, found = random.Random(seed), []
    shapes = [Shape(32, 8, 128), Shape(40, 8, 128), Shape(8, 1, 128), Shape(9, 3, 64)]
    for _ in range(count):
        members = rng.choice([2, 4, 8, 16, 32])
        lengths = [rng.choice([512, 2048, 8192, 32768])] * rng.choice([1, 1, 2, 4, 16])
        f = features_of([(members, n) for n in lengths], rng.choice([64, 256, 1024, 4096]), rng.choice(shapes))
        found.append(Point(f, measured(f, constants, rng, noise)))
    return found
