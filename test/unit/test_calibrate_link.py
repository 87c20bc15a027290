"""The all-reduce in a calibration: the fit of its two constants, where it goes, and what is refused."""

import json
import random
import sys

import pytest

from granikv_sglang.calibrate import __main__ as command
from granikv_sglang.calibrate import link as module
from granikv_sglang.plan import Kind, Machine, analytic
from granikv_sglang.plan.cost import Link
from granikv_sglang.plan.table import Device, load, save
from granikv_sglang.plugin.engines import device_of

SIZES = [rows * module.HIDDEN * 2 for rows in module.ROWS]
DEVICE = Device("Test GPU", Machine(Kind.CUDA, 132), {"torch": "1"})


@pytest.mark.parametrize("truth", [Link(9.0, 1.5e5), Link(300.0, 900.0)])
def test_the_fit_finds_planted_constants_through_noise(truth):
    rng = random.Random(3)
    timed = [(size, truth.us_of(size) * rng.uniform(0.97, 1.03)) for size in SIZES]
    found = module.fit_link(timed)
    assert found.us == pytest.approx(truth.us, rel=0.05)
    assert found.rate == pytest.approx(truth.rate, rel=0.1)


@pytest.mark.parametrize("us", [lambda size: 50.0 - size * 1e-6, lambda size: size * 1e-3 - 5.0], ids=["flat", "steep"])
def test_constants_stay_positive(us):
    found = module.fit_link([(size, us(size)) for size in SIZES])
    assert found.us > 0 and found.rate > 0
    assert all(found.us_of(size) > 0 for size in SIZES)


@pytest.fixture
def timed(monkeypatch):
    timed = [(size, 10.0 + size / 2e5) for size in SIZES]
    monkeypatch.setattr(module, "ask_ranks", lambda tp, kind: timed)
    return timed


def test_it_goes_into_the_calibration_that_is_there(timed, tmp_path):
    path = tmp_path / "c.json"
    before = analytic(DEVICE.machine)
    save(path, DEVICE, before, {"date": "2026-01-01", "residuals": {}})
    lines = module.calibrate_link(4, DEVICE, path)
    constants, about = load(path, DEVICE)
    assert constants.link.us == pytest.approx(10.0, rel=1e-3)
    assert constants.link.rate == pytest.approx(2e5, rel=1e-3)
    assert constants.gemm == before.gemm and about["date"] == "2026-01-01"
    assert (about["link"]["tp"], len(about["link"]["bytes_us"])) == (4, len(SIZES))
    assert "between 4 ranks: 10.0 us and 200.0 GB/s" in lines[0]


def test_without_a_calibration_or_with_one_rank_it_is_one_line(timed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "cache_root", lambda: tmp_path)
    assert command.main(["--tp", "2", "--device", "cpu"]) == 2
    assert "run python -m granikv_sglang.calibrate first" in capsys.readouterr().err
    assert command.main(["--tp", "1", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "granikv: --tp must be at least 2, got 1: one rank has nobody to exchange with\n"
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"format": 99}))
    assert command.main(["--tp", "2", "--device", "cpu", "--out", str(path)]) == 2
    assert "its format is 99" in capsys.readouterr().err


def ranks_that_run(monkeypatch, tmp_path, body):
    """Each rank runs ``body``, with its number in ``rank``, in place of the measurement."""
    script = tmp_path / "rank"
    script.write_text(f"#!{sys.executable}\nimport sys, time\nrank = int(sys.argv[-1])\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(script))


def test_a_rank_that_fails_is_named(monkeypatch, tmp_path):
    ranks_that_run(monkeypatch, tmp_path, "time.sleep(600 * rank)\nsys.exit(1)")
    with pytest.raises(module.GraniKVError, match="rank 0 of 2 ended with exit code 1, its last line: nothing"):
        module.ask_ranks(2, Kind.CPU)


def test_the_rank_that_failed_is_named_and_not_one_that_waits_for_it(monkeypatch, tmp_path):
    """Rank 1 also says more than a pipe holds, which nobody reads before it ends."""
    says = "sys.stderr.write('word ' * 50000 + chr(10) + 'no such device')"
    ranks_that_run(monkeypatch, tmp_path, f"time.sleep(600 * (1 - rank))\n{says}\nsys.exit(3)")
    with pytest.raises(module.GraniKVError, match="rank 1 of 2 ended with exit code 3, its last line: no such device"):
        module.ask_ranks(2, Kind.CPU)


def test_the_users_own_calibration_is_found(timed, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "cache_root", lambda: tmp_path)
    device = device_of(False)
    path = module.user_path(tmp_path, device.name)
    save(path, device, analytic(device.machine), {})
    module.calibrate_link(2, device, None)
    assert load(path, device)[0].link.us == pytest.approx(10.0, rel=1e-3)
