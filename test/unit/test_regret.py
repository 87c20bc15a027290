"""The examination's arithmetic, on times that planted constants give: judged, drawn, and put into the page."""

import json
import random
from types import SimpleNamespace

import pytest

from granikv_sglang.calibrate.cells import regret_grid
from granikv_sglang.calibrate.meter import Lines, Timing, points_of, regimes_of
from granikv_sglang.plan import analytic
from granikv_sglang.plan.fit import fit, regret
from granikv_sglang.plan.table import Device, save
from support.benchmarks import benchmark
from support.passes import H200, measured, planted

examination, regret_plot = benchmark("regret"), benchmark("regret_plot")
DEVICE = Device("Test GPU", H200, {"torch": "1"})


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("regret") / "raw.jsonl", random.Random(2)
    machine = {"kind": "cuda", "units": 132}
    about = {"device": DEVICE.name, "machine": machine, "versions": DEVICE.versions, "driver": "1", "commit": "c"}
    lines = Lines(path, about)
    for cell in regret_grid():
        us = measured(cell.features(), planted(), rng)
        for regime in regimes_of(cell, SimpleNamespace(same_engine=False)):
            lines.add(Timing(cell, regime, us[regime], us[regime], us[regime], 11))
    return path


def test_judging_and_drawing(raw, tmp_path, capsys):
    table, out = tmp_path / "table.json", tmp_path / "judged.jsonl"
    points = [p for _, p in points_of(Lines(raw, {"device": DEVICE.name}).timings)]
    save(table, DEVICE, fit(points[::3], H200), {})
    assert examination.main([str(raw), "--judge-only", "--table", str(table), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"{len(regret_grid())} cells" in said and "MISSED" not in said and said.count("met") == 3
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(regret_grid())
    for row in rows:
        assert row["us"][row["best"]] == min(row["us"].values())
        assert row["regret"] >= 0 and (row["chosen"] != row["best"] or row["regret"] == 0)
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "classifier.md").write_text("before\n<!-- regret -->\nold\n<!-- end: regret -->\nafter\n")
    assert regret_plot.main([str(out), "--docs", str(docs)]) == 0
    page = (docs / "classifier.md").read_text()
    assert page.startswith("before") and page.endswith("after\n") and "old" not in page
    assert page.count("| heads ") == 4 and f"| all | {len(rows)} |" in page
    assert (docs / "img" / "regimes.png").stat().st_size > 10_000


def test_a_bad_table_misses_and_says_so(raw, tmp_path, capsys):
    table = tmp_path / "table.json"
    save(table, DEVICE, analytic(H200), {})
    assert examination.main([str(raw), "--judge-only", "--table", str(table)]) == 0
    assert "MISSED" in capsys.readouterr().out
    found = [p for _, p in points_of(Lines(raw, {"device": DEVICE.name}).timings)]
    assert regret(found, analytic(H200)).p95 > 0.08


def test_refusals(tmp_path, capsys):
    assert examination.main([str(tmp_path / "none.jsonl"), "--judge-only"]) == 2
    assert "is not there" in capsys.readouterr().err
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(SystemExit, match="no judged cell"):
        regret_plot.main([str(empty)])
    with pytest.raises(SystemExit, match="exactly once"):
        page = tmp_path / "page.md"
        page.write_text("")
        regret_plot.fill(page, [])
