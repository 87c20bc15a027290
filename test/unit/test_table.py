"""Calibration files: read back as written, refused in one line, next source used."""

import dataclasses
import json

import pytest

from granikv_sglang.core import GraniKVError, Regime, cache_root
from granikv_sglang.plan import Kind, Machine, analytic
from granikv_sglang.plan.table import SHIPPED, Device, constants_from_json, find, load, save, table_name, user_path
from support.passes import H200, planted

DEVICE = Device("NVIDIA H200", H200, {"torch": "2.11.0", "triton": "3.6.0"})
ABOUT = {"date": "2026-12-01", "driver": "580"}


@pytest.fixture
def made(tmp_path):
    path = user_path(tmp_path, DEVICE.name)
    save(path, DEVICE, planted(), ABOUT)
    return path


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_what_is_written_is_read_back(made):
    constants, provenance = load(made, DEVICE)
    assert provenance == ABOUT
    assert constants == planted()
    assert [p.name for p in made.parent.iterdir()] == ["nvidia-h200.json"]


REFUSALS = {
    "not JSON": (lambda p: p.write_text("{"), "damaged"),
    "no object": (lambda p: p.write_text("[]"), "damaged"),
    "binary": (lambda p: p.write_bytes(b"\xff\xfe\x00"), "damaged"),
    "another GPU": (lambda p: edit(p, lambda v: v.update(device="NVIDIA L4")), "made on 'NVIDIA L4'"),
    "another format": (lambda p: edit(p, lambda v: v.update(format=99)), "its format is 99"),
    "another torch": (lambda p: edit(p, lambda v: v["versions"].update(torch="2.9.0")), "made with torch 2.9.0"),
    "no version": (lambda p: edit(p, lambda v: v["versions"].pop("triton")), "made with triton None"),
    "other units": (lambda p: edit(p, lambda v: v["constants"]["machine"].update(units=114)), "114 units"),
    "a part missing": (lambda p: edit(p, lambda v: v["constants"].pop("gemm")), "damaged"),
    "a constant missing": (lambda p: edit(p, lambda v: v["constants"]["gemm"].pop("rate")), "damaged"),
    "a constant too many": (lambda p: edit(p, lambda v: v["constants"]["link"].update(x=1)), "damaged"),
    "zero": (lambda p: edit(p, lambda v: v["constants"]["gemm"].update(rate=0)), "rate is 0, out of its range"),
    "a share of two": (lambda p: edit(p, lambda v: v["constants"]["uniform"].update(miss=2)), "miss is 2"),
    "not a number": (lambda p: edit(p, lambda v: v["constants"]["gemm"].update(hbm="x")), "hbm is 'x'"),
    "NaN": (lambda p: edit(p, lambda v: v["constants"]["gemm"].update(hbm=float("nan"))), "hbm is nan"),
    "an unknown regime": (lambda p: edit(p, lambda v: v["constants"].update(regimes=["fast"])), "fast"),
    "no regime": (lambda p: edit(p, lambda v: v["constants"].update(regimes=[])), "no shared regimes"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "cannot be read"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_each_refusal_is_one_line_and_the_next_source_is_used(made, name, tmp_path):
    spoil, said = REFUSALS[name]
    spoil(made)
    with pytest.raises(GraniKVError) as caught:
        load(made, DEVICE)
    line = str(caught.value)
    assert said in line and "\n" not in line
    assert str(made) in line and "python -m granikv_sglang.calibrate" in line
    found = find(DEVICE, tmp_path, shipped=tmp_path / "none")
    assert found.source == "analytic" and found.refused == (line,)
    assert found.constants == analytic(H200)


def test_the_users_own_comes_first_then_the_shipped_one(made, tmp_path):
    shipped = tmp_path / "shipped"
    other = dataclasses.replace(planted(), margin=0.07)
    save(shipped / table_name(DEVICE.name), DEVICE, other, ABOUT)
    own = find(DEVICE, tmp_path, shipped)
    assert (own.source, own.constants.margin, own.refused) == ("calibrated", planted().margin, ())
    assert str(made) in own.line and "2026-12-01" in own.line
    made.unlink()
    second = find(DEVICE, tmp_path, shipped)
    assert (second.source, second.constants.margin) == ("shipped", 0.07)
    assert "shipped table" in second.line and "NVIDIA H200" in second.line
    elsewhere = find(Device("NVIDIA L4", Machine(Kind.CUDA, 58), DEVICE.versions), tmp_path, shipped)
    assert elsewhere.source == "analytic" and elsewhere.constants.machine.units == 58
    assert all("\n" not in found.line for found in (own, second, elsewhere))


def test_every_shipped_table_can_be_read_by_its_name():
    for path in SHIPPED.glob("*.json"):
        value = json.loads(path.read_text())
        assert path.name == table_name(value["device"])
        constants = constants_from_json(value["constants"])
        assert Regime.UNIFORM not in constants.regimes
        assert load(path, Device(value["device"], constants.machine, value["versions"]))


def test_the_cache_folder_follows_the_environment():
    assert str(cache_root({"GRANIKV_CACHE": "/x"})) == "/x"
    assert str(cache_root({"XDG_CACHE_HOME": "/y"})) == "/y/granikv"
    assert cache_root({}).parts[-2:] == (".cache", "granikv")
