"""Fitting: planted constants are found again, choices by them are good, and what cannot be known stays as it was."""

import dataclasses
import random

import pytest

from granikv_sglang.core import Regime
from granikv_sglang.plan import analytic
from granikv_sglang.plan import fit as fitting
from granikv_sglang.plan.fit import (
    CAUTION,
    Point,
    Residuals,
    choose_margin,
    errors,
    fit,
    quantile,
    regret,
    worth_having,
)
from granikv_sglang.plan.work import is_plain
from support.passes import H200, SHARED, features_of, planted, points, with_both


def test_planted_constants_are_found_from_noisy_times():
    true = planted()
    found = fit(points(120, true, seed=1), H200)
    fresh = points(150, true, seed=2, noise=0.0)
    for regime in Regime:
        before = Residuals.of(errors(fresh, analytic(H200), regime))
        after = Residuals.of(errors(fresh, found, regime))
        assert after.points == 150
        assert after.median < 0.03 and after.p95 < 0.1
        assert before.median > 3 * after.median
    for name in ("launch_us", "hbm", "again"):
        assert getattr(found.uniform, name) == pytest.approx(getattr(true.uniform, name), rel=0.1)
    assert found.gemm.rate == pytest.approx(true.gemm.rate, rel=0.15)
    assert found.cascade.rate == pytest.approx(true.cascade.rate, rel=0.15)


def test_choices_by_fitted_constants_lose_almost_nothing():
    true = planted()
    found = fit(points(120, true, seed=3), H200)
    judged = regret(points(250, true, seed=4, noise=0.0), found)  # no measurement, so no disturbed tie
    assert judged.cells == 250 and sum(judged.chosen.values()) == 250
    assert all(judged.chosen[regime] > 10 for regime in Regime)
    assert judged.median <= 0.01 and judged.p95 <= 0.08 and judged.slower <= 0.02
    # Unfitted constants choose worse on the same times: the examination can fail.
    assert regret(points(250, true, seed=4), analytic(H200)).p95 > 0.08


def test_one_disturbed_measurement_does_not_bend_the_fit():
    true = planted()
    clean = points(80, true, seed=5, noise=0.0)
    disturbed = [Point(clean[0].features, {r: 8 * us for r, us in clean[0].us.items()}), *clean[1:]]
    found = fit(disturbed, H200)
    assert Residuals.of(errors(clean[1:], found, Regime.BATCHED_GEMM)).median < 0.05


def test_constants_stay_in_their_ranges_whatever_is_measured():
    rng = random.Random(6)
    wild = [Point(p.features, {r: rng.lognormvariate(3, 3) for r in Regime}) for p in points(25, planted(), seed=7)]
    found = fit(wild, H200)
    for part in (found.uniform, found.cascade, found.gemm):
        for name, value in dataclasses.asdict(part).items():
            assert value > 0 and value < float("inf"), name
    assert 0 <= found.uniform.miss <= 1 and 0 <= found.gemm.overlap <= 1


def test_a_regime_that_was_not_measured_keeps_its_constants():
    start = analytic(H200)
    only = [Point(p.features, {Regime.UNIFORM: p.us[Regime.UNIFORM]}) for p in points(30, planted(), seed=8)]
    found = fit(only, H200)
    assert found.gemm == start.gemm and found.cascade == start.cascade and found.regimes == start.regimes
    assert found.uniform != start.uniform
    with pytest.raises(ValueError, match="nothing was measured"):
        fit([], H200)


def test_a_regime_that_is_never_better_gets_no_engine():
    true = planted()
    slow = dataclasses.replace(true, cascade=dataclasses.replace(true.cascade, launch_us=500.0))
    assert worth_having(points(60, slow, seed=9), slow) == (Regime.BATCHED_GEMM,)
    assert worth_having(points(60, true, seed=9), true) == SHARED


def flatter(exact, rate):
    return [Point(p.features, {r: us * (rate if r in SHARED else 1) for r, us in p.us.items()}) for p in exact]


def test_the_margin_keeps_choices_from_being_slower_than_uniform():
    """A model that flatters the shared regime by 8% needs a margin; an exact one needs none, and takes what is free."""
    true = planted()
    exact = [p for p in points(200, true, seed=10, noise=0.0) if not is_plain(p.features.shape, H200)]
    free = choose_margin([(exact, true)], plain=False)
    assert regret(exact, dataclasses.replace(true, margin=free)).p95 <= CAUTION
    margin = choose_margin([(flatter(exact, 1.08), true)], plain=False)
    assert 0.0 < margin <= 0.25
    assert regret(flatter(exact, 1.08), dataclasses.replace(true, margin=margin)).slower <= 0.02
    assert regret(flatter(exact, 1.08), dataclasses.replace(true, margin=0.0)).slower > 0.02


def test_each_stock_kernel_gets_the_margin_that_its_own_points_ask_for():
    true = planted()
    exact = points(400, true, seed=11, noise=0.0)
    plain = [p for p in exact if is_plain(p.features.shape, H200)]
    other = [p for p in exact if not is_plain(p.features.shape, H200)]
    assert plain and other
    judged = [(flatter(plain, 1.15) + other, true)]
    own = choose_margin([(other, true)], plain=False)
    assert choose_margin(judged, plain=False) == own
    assert choose_margin(judged, plain=True) > own
    assert choose_margin([(other, true)], plain=True) == true.plain_margin  # nothing to judge by


def test_the_margin_is_chosen_on_points_that_were_not_fitted(monkeypatch):
    seen = []
    monkeypatch.setattr(fitting, "choose_margin", lambda judged, plain: seen.append(judged) or 0.05)
    measured = points(60, planted(), seed=12)
    fit(measured, H200)
    for judged in seen:
        assert sorted(id(p) for own, _ in judged for p in own) == sorted(map(id, measured))
        assert len({c for _, c in judged}) == len(judged) == fitting.FOLDS
    seen.clear()
    fit(measured[:20], H200)
    assert [len(judged) for judged in seen] == [1, 1]


def test_regret_counts_only_cells_with_something_to_choose():
    f = features_of([(64, 16384)])
    alone = Point(f, {Regime.UNIFORM: 10.0})
    both = Point(f, {Regime.UNIFORM: 10.0, Regime.BATCHED_GEMM: 12.0})
    judged = regret([alone, both], with_both(analytic(H200)))
    assert judged.cells == 1 and judged.worst == pytest.approx(0.2) and judged.slower == pytest.approx(0.2)
    assert quantile([0.0, 1.0, 2.0], 0.75) == 1.5
