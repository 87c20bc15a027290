"""Fits the constants of the cost model to measured times, and judges choices by them. numpy only, no randomness."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from granikv_sglang.core import Regime
from granikv_sglang.plan.classify import Classifier
from granikv_sglang.plan.cost import (
    FRACTIONS,
    Constants,
    SharedConstants,
    UniformConstants,
    analytic,
    cost_of,
)
from granikv_sglang.plan.features import Features
from granikv_sglang.plan.work import Machine, Work, is_plain, work_of

STEPS = 60
PRIOR = 0.02
"""Weight of staying near the analytic constants: decides only what the measurements leave open."""
OUTLIER = 0.25
"""Relative error from which a point counts less: one disturbed measurement must not bend the fit."""
NEAR, FAR_WEIGHT = 0.4, 0.3
"""Where two regimes' times are this far apart (natural logarithm) a point weighs half, and never less than the second:
a prediction has to be right where the choice is close; elsewhere it may be 20% off and the choice is the same."""
MARGINS = tuple(i / 100 for i in (*range(0, 12), *range(12, 42, 2)))
SLOWER = 0.01
"""How much slower than UNIFORM a choice may be where it was measured."""
SLOWER_WEIGHT = 5.0
CAUTION = 0.02
"""Regret that a larger margin may cost."""
FOLDS, ENOUGH = 5, 40
"""The margin is chosen on predictions for points held out of a fit, one of so many parts at a time, where there are
enough points."""
WORTH = 0.002
"""What a shared regime must save, on average over the points, to be worth an engine and graphs of its own."""

Floats = npt.NDArray[np.float64]
C = TypeVar("C", UniformConstants, SharedConstants)


@dataclass(frozen=True)
class Point:
    """A pass that was measured under one or more regimes: microseconds of a layer."""

    features: Features
    us: Mapping[Regime, float]


@dataclass(frozen=True)
class Residuals:
    """Relative errors of predictions, as shares: median and 95th percentile of their size, and the worst."""

    points: int
    median: float
    p95: float
    worst: float

    @staticmethod
    def of(errors: Sequence[float]) -> Residuals:
        """Of signed relative errors; all zero where there are none."""
        sizes = sorted(abs(e) for e in errors) or [0.0]
        return Residuals(len(errors), statistics.median(sizes), quantile(sizes, 0.95), sizes[-1])


@dataclass(frozen=True)
class Regret:
    """Chosen regime against the best one, over cells; shares of the best time, and of UNIFORM's for ``slower``.

    Attributes:
        cells: cells in which UNIFORM and at least one other regime were measured.
        median, p95, worst: of (time of the chosen regime / time of the best) - 1.
        slower: the worst of (time of the chosen regime / time of UNIFORM) - 1; 0 where no choice was slower.
        chosen: cells by regime.
    """

    cells: int
    median: float
    p95: float
    worst: float
    slower: float
    chosen: Mapping[Regime, int]


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours; ``ordered`` ascends and is not empty."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def fit(points: Sequence[Point], machine: Machine) -> Constants:
    """Constants for ``points``; regimes without a point keep the analytic ones.

    Levenberg-Marquardt on the logarithm of predicted over measured time, in the logarithm (fractions: the logit) of the
    constants, so that none can leave its range. Raises ValueError where nothing was measured.
    """
    if not points:
        raise ValueError("nothing was measured")
    base = analytic(machine)
    found = _fit_engines(points, base, machine)
    chosen = dataclasses.replace(found, regimes=worth_having(points, found))
    base = dataclasses.replace(base, regimes=chosen.regimes)
    folds = range(FOLDS if len(points) >= ENOUGH else 0)
    held_out = [(points[k::FOLDS], _fit_engines(_without(points, k), base, machine)) for k in folds]
    held_out = held_out or [(points, chosen)]
    return dataclasses.replace(
        chosen, margin=choose_margin(held_out, plain=False), plain_margin=choose_margin(held_out, plain=True)
    )


def _without(points: Sequence[Point], fold: int) -> list[Point]:
    return [point for i, point in enumerate(points) if i % FOLDS != fold]


def _fit_engines(points: Sequence[Point], base: Constants, machine: Machine) -> Constants:
    """``base`` with the constants of every engine that was measured."""
    found: dict[str, Any] = {}
    for name, regime, plain in (
        ("uniform", Regime.UNIFORM, False),
        ("plain", Regime.UNIFORM, True),
        ("cascade", Regime.CASCADE, None),
        ("gemm", Regime.BATCHED_GEMM, None),
    ):
        own = [p for p in points if regime in p.us and _is_of(p, plain, machine)]
        if own:
            measured = [(work_of(p.features, machine, regime), p.us[regime]) for p in own]
            found[name] = _fit_one(measured, [nearness(p, regime) for p in own], getattr(base, name), machine)
    return dataclasses.replace(base, machine=machine, **found)


def _is_of(point: Point, plain: bool | None, machine: Machine) -> bool:
    """Whether a point tells of the stock backend's plain or other kernel; with None, of an engine that shares."""
    if plain is None:
        return bool(point.features.tokens)
    return is_plain(point.features.shape, machine) is plain


def nearness(point: Point, regime: Regime) -> float:
    """Weight of a measurement of ``regime``: 1 where the best of the others takes as long, less the further it is."""
    others = [us for r, us in point.us.items() if r is not regime]
    if not others:
        return 1.0
    apart = math.log(min(others) / point.us[regime]) / NEAR
    return max(FAR_WEIGHT, 1 / (1 + apart * apart))


def worth_having(points: Sequence[Point], constants: Constants) -> tuple[Regime, ...]:
    """Shared regimes measured to save at least :data:`WORTH` on average over the best of the others."""
    seen = [r for r in (Regime.CASCADE, Regime.BATCHED_GEMM) if any(r in p.us for p in points)]
    if len(seen) < 2:
        return tuple(seen) or constants.regimes
    both = [p.us for p in points if all(r in p.us for r in (Regime.UNIFORM, *seen))]
    kept = []
    for regime in seen:
        without = [min(us for r, us in times.items() if r is not regime) / min(times.values()) - 1 for times in both]
        if not both or statistics.fmean(without) > WORTH:
            kept.append(regime)
    return tuple(kept) or (Regime.BATCHED_GEMM,)


def choose_margin(judged: Sequence[tuple[Sequence[Point], Constants]], plain: bool) -> float:
    """The largest margin whose regret is as good as the least, for passes whose stock kernel is plain or not.

    Args:
        judged: points, and constants that were not fitted on them.
        plain: which points to look at.

    Regret counts in the median and the 95th percentile; being slower than UNIFORM by more than :data:`SLOWER` counts
    extra. That is a cost and not a bar: one disturbed measurement must not drive the margin to where sharing is given
    up. Within :data:`CAUTION` of the least the largest is taken: what nobody measured may be slower too.
    """
    own = [([p for p in points if _is_of(p, plain, c.machine) and p.features.tokens], c) for points, c in judged]
    if not any(points for points, _ in own):
        return judged[0][1].plain_margin if plain else judged[0][1].margin

    def badness(margin: float) -> float:
        wary = [(points, dataclasses.replace(c, margin=margin, plain_margin=margin)) for points, c in own]
        found = _judge(chain.from_iterable(starmap(choices, wary)))
        return found.median + found.p95 + SLOWER_WEIGHT * max(0.0, found.slower - SLOWER)

    found = {margin: badness(margin) for margin in MARGINS}
    return max(margin for margin in MARGINS if found[margin] <= min(found.values()) + CAUTION)


def errors(points: Sequence[Point], constants: Constants, regime: Regime) -> list[float]:
    """(predicted / measured) - 1 at every point where the regime was measured."""
    found = []
    for point in points:
        if regime in point.us:
            own, work = constants.of(regime, point.features.shape), work_of(point.features, constants.machine, regime)
            found.append(cost_of(work, own, constants.machine).us / point.us[regime] - 1)
    return found


def measured_regimes(point: Point, constants: Constants) -> tuple[Regime, ...]:
    """Shared regimes that a server could have chosen: those in use whose engine holds the pass, so it was timed."""
    return tuple(regime for regime in constants.regimes if regime in point.us)


def choices(points: Sequence[Point], constants: Constants) -> Iterator[tuple[Regime, float, float]]:
    """What is chosen at each point, its regret, and how much slower than UNIFORM it is (or less than 0), as shares."""
    classifier = Classifier(constants)
    for point in points:
        if Regime.UNIFORM in point.us and len(point.us) > 1:
            regime = classifier.classify(point.features, None, measured_regimes(point, constants)).regime
            taken = point.us[regime]
            yield regime, taken / min(point.us.values()) - 1, taken / point.us[Regime.UNIFORM] - 1


def regret(points: Sequence[Point], constants: Constants) -> Regret:
    """Judge the classifier's choices, none of them held, on measured times."""
    return _judge(choices(points, constants))


def _judge(made: Iterable[tuple[Regime, float, float]]) -> Regret:
    losses, slower, chosen = [], 0.0, dict.fromkeys(Regime, 0)
    for regime, loss, over in made:
        chosen[regime] += 1
        losses.append(loss)
        slower = max(slower, over)
    ordered = sorted(losses) or [0.0]
    return Regret(len(losses), statistics.median(ordered), quantile(ordered, 0.95), ordered[-1], slower, chosen)


def _fit_one(measured: Sequence[tuple[Work, float]], weights: Sequence[float], start: C, machine: Machine) -> C:
    names = [f.name for f in dataclasses.fields(start)]
    prior = np.array([_to_free(n, getattr(start, n)) for n in names])
    target = np.array([us for _, us in measured])
    weight = PRIOR * len(measured) ** 0.5
    near = np.sqrt(np.array(weights))

    def constants_of(free: Floats) -> C:
        return type(start)(**{n: _from_free(n, x) for n, x in zip(names, free.tolist(), strict=True)})

    def residuals(free: Floats) -> Floats:
        own = constants_of(free)
        times = np.array([cost_of(work, own, machine).us for work, _ in measured])
        return np.concatenate((near * np.log(times / target), weight * (free - prior)))

    def damped(r: Floats) -> Floats:
        """Weights of a robust loss: the prior's part is left alone."""
        w = np.ones_like(r)
        w[: len(measured)] = 1 / np.sqrt(1 + (r[: len(measured)] / OUTLIER) ** 2)
        return w

    free, damping = prior.copy(), 1e-2
    r = residuals(free)
    for _ in range(STEPS):
        w = damped(r)
        jacobian = np.stack([(residuals(free + step) - r) / 1e-4 for step in np.eye(len(names)) * 1e-4], axis=1)
        jacobian, weighted = jacobian * w[:, None], r * w
        normal, slope = jacobian.T @ jacobian, jacobian.T @ weighted
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), -slope)
            step = np.clip(step, -1.5, 1.5)
            tried = residuals(free + step)
            if float(((tried * w) ** 2).sum()) < float((weighted**2).sum()):
                free, r, damping = free + step, tried, max(1e-7, damping / 4)
                break
            damping *= 4
        else:
            break
        if float(np.abs(step).max()) < 1e-5:
            break
    return constants_of(free)


def _to_free(name: str, value: float) -> float:
    if name in FRACTIONS:
        inside = min(max(value, 0.02), 0.98)  # nearer to an end the slope vanishes
        return float(np.log(inside / (1 - inside)))
    return float(np.log(value))


def _from_free(name: str, free: float) -> float:
    if name in FRACTIONS:
        return float(1 / (1 + np.exp(-min(max(free, -30.0), 30.0))))
    return float(np.exp(min(max(free, -40.0), 40.0)))
