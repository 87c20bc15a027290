"""The classifier: what it counts, what it chooses, that it does not flap, and that ranks cannot disagree."""

import dataclasses
import itertools
import random
import subprocess
import sys

import pytest

from granikv_sglang.core import Bound, Counters, Reason, Regime, Span
from granikv_sglang.plan import Classifier, Decision, Kind, Machine, Planner, Shape, Standing, analytic
from granikv_sglang.plan.classify import HOLD_PASSES, LARGE_GAIN
from granikv_sglang.plan.cost import Link, predict
from granikv_sglang.plan.planner import RECLASSIFY_PASSES
from granikv_sglang.plan.work import SOFTMAX, shared_work, uniform_work
from support.passes import H200, LLAMA, SHARED, features_of, planted, with_both

AUTO = Classifier(analytic(H200))


@pytest.mark.parametrize(
    ("groups", "regime", "reason"),
    [
        ([(64, 16384)], Regime.BATCHED_GEMM, Reason.COMPUTE_BOUND),
        ([(8, 2048 * (i + 1)) for i in range(8)], Regime.BATCHED_GEMM, Reason.MEMORY_BOUND),
        ([(2, 512)], Regime.UNIFORM, Reason.TOO_SMALL),
    ],
)
def test_what_was_measured_on_an_h200_decides_alike(groups, regime, reason):
    decision = AUTO.classify(features_of(groups))
    assert (decision.regime, decision.reason) == (regime, reason)
    assert {name for name, _ in decision.predicted_us} == {Regime.UNIFORM, Regime.BATCHED_GEMM}


def test_nothing_shared_and_forcing():
    nothing = features_of([(2, 512)])._replace(tokens=features_of([(1, 1)]).tokens[:0])
    assert AUTO.classify(nothing) == Decision(Regime.UNIFORM, Reason.NOTHING_SHARED)
    for regime in Regime:
        forced = Classifier.of(H200, regime)
        decision = forced.classify(features_of([(2, 512)]))
        assert (decision.regime, decision.reason) == (regime, Reason.FORCED)
        assert forced.classify(nothing).reason is Reason.NOTHING_SHARED
        assert forced.regimes() == (() if regime is Regime.UNIFORM else (regime,))


@pytest.mark.parametrize("seed", range(20))
def test_work_is_counted_as_a_plain_loop_counts_it(seed):
    rng = random.Random(seed)
    shape = rng.choice([LLAMA, Shape(9, 3, 64), Shape(8, 1, 128), Shape(40, 8, 128)])
    groups = [(rng.randint(2, 60), rng.randint(1, 20000)) for _ in range(rng.randint(1, 12))]
    f = features_of(groups, tail=100, shape=shape)
    narrow = sum(n for m, n in groups if m * shape.gqa <= 32) * shape.kv_heads >= 8 * 32768
    areas = {regime: 0 for regime in SHARED}
    again = dict(areas)
    small = 16 if f.rows * shape.gqa <= 16 else 64 if f.rows * shape.gqa <= 64 else 128
    for members, tokens in groups:
        rows, blocks = members * shape.gqa, -(-tokens // 64)
        for regime in SHARED:
            tile = small if regime is Regime.CASCADE else 64 if narrow and rows <= 32 else 128
            areas[regime] += blocks * 64 * -(-rows // tile) * tile
            again[regime] += tokens * (-(-rows // tile) - 1)
    for regime in SHARED:
        done = shared_work(f, H200, regime)
        assert done.operations == areas[regime] * (4 * shape.head_dim + SOFTMAX) * shape.kv_heads
        assert done.again_bytes == again[regime] * shape.token_bytes
        assert done.prefix_bytes == sum(n for _, n in groups) * shape.token_bytes
    stock = uniform_work(f, H200)
    assert stock.read_bytes == sum(m * n for m, n in groups) * shape.token_bytes
    assert stock.prefix_bytes == sum(n for _, n in groups) * shape.token_bytes
    assert stock.tail_bytes == 100 * f.rows * shape.token_bytes


def test_equal_requests_run_in_whole_waves_and_uneven_ones_fill_gaps():
    """36 requests of 8 KV heads are 288 thread blocks on 264 places: two waves, the second nearly empty."""
    even = uniform_work(features_of([(12, 10000)] * 3, tail=320), H200)
    assert even.waves == 1 and even.idle == pytest.approx(2 / (288 / 264) - 1)
    uneven = uniform_work(features_of([(12, 8000), (12, 10000), (12, 12000)], tail=320), H200)
    assert uneven.waves == 1 and uneven.idle < even.idle
    fits = uniform_work(features_of([(32, 10000)], tail=320), H200)
    assert fits.waves == 0 and fits.idle == pytest.approx(264 / 256 - 1)


def test_tails_take_whole_rounds_of_whole_tiles():
    """24 tails of 192 tokens: 2 pieces of up to 2 tiles each for 8 KV heads, 384 units on 132 multiprocessors."""
    done = shared_work(features_of([(24, 768)], tail=192), H200, Regime.BATCHED_GEMM)
    assert done.rounds == 3
    assert done.tail_bytes == 3 * 132 * 2 * 64 // 8 * LLAMA.token_bytes
    half = shared_work(features_of([(24, 768)], tail=192, shape=Shape(32, 8, 64)), H200, Regime.BATCHED_GEMM)
    assert half.rounds == 1.5


def test_the_stock_kernel_without_tensor_cores_has_a_margin_of_its_own():
    constants = dataclasses.replace(AUTO.constants, margin=0.01, plain_margin=0.3)
    assert constants.margin_of(LLAMA) == 0.01 and constants.margin_of(Shape(9, 3, 64)) == 0.3
    few = features_of([(8, 8192)], tail=64, shape=Shape(9, 3, 64))
    loose = Classifier(dataclasses.replace(constants, plain_margin=0.0)).classify(few)
    gain = 1 - loose.predicted_us[1][1] / loose.predicted_us[0][1]
    assert loose.regime is Regime.BATCHED_GEMM and gain > 0
    wary = Classifier(dataclasses.replace(constants, plain_margin=min(0.99, gain * 1.1)))
    assert wary.classify(few).regime is Regime.UNIFORM


@pytest.mark.parametrize("kind", list(Kind))
def test_more_work_never_takes_less_time(kind):
    constants = with_both(analytic(Machine(kind, 132 if kind is Kind.CUDA else 1)))

    def times(groups, tail):
        return [c.us for c in predict(features_of(groups, tail), constants, SHARED)]

    small = times([(16, 4096)], 256)
    for larger in (times([(16, 8192)], 256), times([(32, 4096)], 256), times([(16, 4096)], 512)):
        assert all(b > a for a, b in zip(small, larger, strict=True))


def test_where_the_all_reduce_costs_more_attention_must_gain_more():
    f = features_of([(16, 4096)], shape=dataclasses.replace(LLAMA, tp=2))
    quick = Classifier(dataclasses.replace(AUTO.constants, link=Link(1e-3, 1e9)))
    assert quick.classify(f).regime is Regime.BATCHED_GEMM
    uniform, shared = (us for _, us in quick.classify(f).predicted_us)
    gain = 1 - shared / uniform
    slow = dataclasses.replace(AUTO.constants, link=Link(1.1 * uniform, 1e9), margin=gain / 4)
    bound = Classifier(slow).classify(f)
    assert (bound.regime, bound.reason) == (Regime.BATCHED_GEMM, Reason.COMMUNICATION_BOUND)
    slowest = dataclasses.replace(slow, link=Link(6 * uniform, 1e9))
    fewest = Classifier(slowest).classify(f)
    assert (fewest.regime, fewest.bound) == (Regime.UNIFORM, Bound.COMMUNICATION)
    assert Classifier(slowest).classify(f._replace(shape=LLAMA)).regime is Regime.BATCHED_GEMM


def test_one_engine_for_both_regimes_is_named_by_what_bounds_the_pass():
    cpu = Classifier(analytic(Machine(Kind.CPU, 1)))
    small = Shape(9, 3, 64, 4)
    few, many = (cpu.classify(features_of([(m, 2048)], 32, small)) for m in (2, 64))
    assert few.regime is Regime.CASCADE
    assert (many.regime, many.reason) == (Regime.BATCHED_GEMM, Reason.COMPUTE_BOUND)
    assert few.predicted_us[1][1] == few.predicted_us[2][1]


def near_tie(classifier):
    """Members and length at which UNIFORM and the best shared regime cross the margin."""
    low, high = 64, 32768
    while high - low > 1:
        middle = (low + high) // 2
        if classifier.classify(features_of([(8, middle)])).regime is Regime.UNIFORM:
            low = middle
        else:
            high = middle
    return high


@pytest.mark.parametrize("seed", range(10))
def test_near_ties_do_not_flap(seed):
    """Lengths that wobble about the crossing: left alone the choice would change all the time; held, once at most."""
    rng = random.Random(seed)
    at = near_tie(AUTO)
    alone, held = [], []
    standing = None
    for _ in range(300):
        f = features_of([(8, at + rng.randint(-at // 50, at // 50))])
        alone.append(AUTO.classify(f).regime)
        decision = AUTO.classify(f, standing)
        changed = standing is None or decision.regime is not standing.regime
        standing = Standing(decision.regime, 0 if changed else standing.passes + 1)
        held.append(decision.regime)

    def switches(regimes):
        return sum(a is not b for a, b in itertools.pairwise(regimes))

    assert switches(alone) > 50
    assert switches(held) <= 1


def test_a_large_gain_ends_the_hold_and_a_loss_is_never_held():
    f = features_of([(64, 16384)])
    fresh = Standing(Regime.UNIFORM, 0)
    assert AUTO.classify(f, fresh).regime is Regime.BATCHED_GEMM
    rng = random.Random(3)
    for _ in range(300):
        groups = [(rng.randint(2, 40), rng.randint(128, 16384))] * rng.randint(1, 8)
        for standing in (Standing(r, p) for r in (*SHARED, Regime.UNIFORM) for p in (0, HOLD_PASSES)):
            classifier = Classifier(planted()) if rng.random() < 0.5 else AUTO
            decision = classifier.classify(features_of(groups), standing)
            us = dict(decision.predicted_us)
            assert us[decision.regime] <= us[Regime.UNIFORM]
            assert decision.reason is not Reason.NEAR_TIE or decision.regime is standing.regime
            if standing.passes < HOLD_PASSES and standing.regime in us and decision.regime is not standing.regime:
                gained = us[decision.regime] < us[standing.regime] * (1 - LARGE_GAIN)
                margin = classifier.constants.margin
                lost = us[standing.regime] >= us[Regime.UNIFORM] * (1 - margin / 2) and standing.regime in SHARED
                assert gained or lost or decision.regime is Regime.UNIFORM


def test_a_short_gain_waits_until_the_hold_ends():
    at = near_tie(AUTO)
    f = features_of([(8, at + at // 20)])
    assert AUTO.classify(f).regime is Regime.BATCHED_GEMM
    waiting = AUTO.classify(f, Standing(Regime.UNIFORM, HOLD_PASSES - 1))
    assert (waiting.regime, waiting.reason) == (Regime.UNIFORM, Reason.NEAR_TIE)
    assert AUTO.classify(f, Standing(Regime.UNIFORM, HOLD_PASSES)).regime is Regime.BATCHED_GEMM


# -- the planner around it --------------------------------------------------------------------------------------------


def run(schedule, classifier):
    """Regime, reason and predictions, to the last bit, of every pass of a schedule of (key, groups, tokens)."""
    planner = Planner(classifier, shape=LLAMA, counters=Counters())
    said = []
    for key, groups, tail in schedule:
        rows = [((i, Span(i << 16, n)),) for i, (m, n) in enumerate(groups) for _ in range(m)]
        paths = [list(path) for path in rows]
        tokens = sum(path[0][1].length for path in rows) + tail * len(rows)
        d = planner.decode(key, lambda p=paths: p, lambda t=tokens: t).decision
        said.append((d.regime.value, d.reason.value, d.bound.value, [us.hex() for _, us in d.predicted_us]))
    return said


def schedule(seed):
    rng, passes, tail = random.Random(seed), [], 1
    for key in range(60):
        most = rng.choice([3, 24])
        groups = [(rng.randint(1, most), rng.randint(130, 9000)) for _ in range(rng.randint(1, most // 3))]
        for _ in range(rng.randint(1, 150)):
            tail += 1
            passes.append((key, groups, tail))
    return passes


def test_ranks_decide_alike_to_the_last_bit():
    """Another process, with other hashes, takes the same decisions with the same predictions."""
    code = (
        "from unit.test_classify import run, schedule, Classifier, planted; import hashlib\n"
        "print(hashlib.sha256(repr(run(schedule(5), Classifier(planted()))).encode()).hexdigest())"
    )
    digests = set()
    for hash_seed in ("1", "2"):
        asked = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip
        digests.add(asked.stdout)
    assert len(digests) == 1
    here = run(schedule(5), Classifier(planted()))
    assert {said[0] for said in here} == {"uniform", "cascade", "batched_gemm"}


def test_the_plan_is_weighed_again_now_and_then_and_kept_while_the_regime_stays():
    counters = Counters()
    planner = Planner(AUTO, shape=LLAMA, counters=counters)
    paths = [[(1, Span(0, 16384))]] * 64
    tokens = [64 * 16400]
    asked = []

    def count():
        asked.append(1)
        return tokens[0]

    first = planner.decode("a", lambda: paths, count)
    for _ in range(RECLASSIFY_PASSES - 1):
        assert planner.decode("a", lambda: paths, count) is first
    again = planner.decode("a", lambda: paths, count)
    assert again.version == first.version and again.items is first.items
    assert (len(asked), counters.reclassified, counters.regime_switches) == (2, 1, 0)
    # Tails so long that what is shared hardly matters: the regime changes, and with it the version.
    tokens[0] = 64 * 16384 + 64 * 2_000_000
    for _ in range(RECLASSIFY_PASSES):
        last = planner.decode("a", lambda: paths, count)
    assert last.decision.regime is Regime.UNIFORM and last.version > first.version and last.items == ()
    assert counters.regime_switches == 1
    assert counters.bounds[(Regime.BATCHED_GEMM, Bound.COMPUTE)] == 2 * RECLASSIFY_PASSES
    assert counters.as_dict()["bounds"]["uniform"] == {"memory": 1}


def test_the_prediction_of_now_follows_the_tails():
    planner = Planner(AUTO, shape=LLAMA, counters=Counters())
    plan = planner.decode("a", lambda: [[(1, Span(0, 16384))]] * 64, lambda: 64 * 16400)
    assert planner.predicted_us(64 * 16400) == dict(plan.decision.predicted_us)[Regime.BATCHED_GEMM]
    assert planner.predicted_us(64 * 18000) > planner.predicted_us(64 * 16400)
    planner.decode("b", lambda: [[], []], lambda: 4000)
    assert 0 < planner.predicted_us(4000) < planner.predicted_us(400000)
