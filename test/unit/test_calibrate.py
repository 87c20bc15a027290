"""Calibration from grid to file, with a device whose true constants are known; and the CPU's own meter."""

import dataclasses
import json
import random

import pytest
import torch

from granikv_sglang.backends import cascade_plan
from granikv_sglang.calibrate import __main__ as command
from granikv_sglang.calibrate import cuda
from granikv_sglang.calibrate.cells import (
    CPU_LAYOUTS,
    GPU_LAYOUTS,
    LLAMA,
    MAX_ROWS,
    Cell,
    calibration_grid,
    cpu_grid,
    fits,
    layout_of,
    needed_slots,
    regret_grid,
    split,
)
from granikv_sglang.calibrate.cpu import CpuMeter, Inputs
from granikv_sglang.calibrate.meter import Lines, Timing, points_of, read_timings, regimes_of
from granikv_sglang.calibrate.run import calibrate, measure, provenance, summary, write
from granikv_sglang.core import GraniKVError, Regime
from granikv_sglang.plan.table import Device, find, user_path
from support.passes import H200, measured, planted

DEVICE = Device("Test GPU", H200, {"torch": "1"})


class Planted:
    """A device that takes as long as planted constants say, give or take 2%."""

    same_engine = False

    def __init__(self, fail_after=None):
        self.opened, self.timed, self._rng, self._fail_after = [], [], random.Random(1), fail_after

    def open(self, layout, cells):
        assert all(cell.layout == layout for cell in cells)
        self.opened.append(layout)

    def time(self, cell, regime):
        if self._fail_after is not None and len(self.timed) == self._fail_after:
            raise RuntimeError("out of memory")
        assert cell.layout == self.opened[-1]
        self.timed.append((cell, regime))
        us = measured(cell.features(), planted(), self._rng)[regime]
        return Timing(cell, regime, us, us * 0.99, us * 1.01, 11)


def test_the_examination_covers_what_it_must():
    grid = regret_grid()
    assert len(set(grid)) == len(grid) >= 200
    assert {c.members for c in grid} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert (min(c.tokens for c in grid), max(c.tokens for c in grid)) == (512, 32768)
    assert {c.groups for c in grid} >= {1, 2, 4, 16}
    assert {(c.layout.q_heads, c.layout.kv_heads) for c in grid} == {(32, 8), (40, 8), (8, 1), (9, 3)}
    assert {c.tail for c in grid} == {64, 256, 1024, 4096}
    assert all(fits(c) and c.rows <= MAX_ROWS for c in grid)
    assert not set(grid) & set(calibration_grid()), "nothing is examined on what it was fitted on"


@pytest.mark.parametrize("grid", [regret_grid, calibration_grid, cpu_grid])
def test_every_beginning_of_a_grid_has_all_layouts(grid):
    cells = grid()
    layouts = {c.layout for c in cells}
    assert {c.layout for c in cells[: len(layouts)]} == layouts <= {*GPU_LAYOUTS, *CPU_LAYOUTS}
    assert cells == grid(), "the same order every time"
    fit_on, check_on = split(cells)
    assert not set(fit_on) & set(check_on) and {c.layout for c in check_on} == layouts


@pytest.mark.parametrize("mixed", [False, True])
def test_a_cells_tokens_lie_apart(mixed):
    cell = Cell(LLAMA, 3, 4, 100, 7, mixed)
    starts, tails = layout_of(cell, needed_slots(cell))
    used = [slot for start, n in zip(starts, cell.lengths, strict=True) for slot in range(start, start + n)]
    used += tails.reshape(-1).tolist()
    assert len(set(used)) == len(used) == cell.slots and max(used) < needed_slots(cell)
    features = cell.features()
    assert features.cold == 84 and features.unique == sum(cell.lengths) and features.longest == 100
    assert Cell.from_json(json.loads(json.dumps(cell.to_json()))) == cell
    with pytest.raises(ValueError, match="needs"):
        layout_of(cell, cell.slots)


def test_planted_constants_are_found_by_a_whole_calibration(tmp_path):
    lines = Lines(None, {"device": DEVICE.name})
    assert measure(calibration_grid(), Planted(), lines, 60, show=False)
    result = calibrate(lines, DEVICE)
    assert (result.fitted, result.checked) == (len(calibration_grid()) - result.checked, result.checked)
    assert result.checked > 20
    assert all(r.points and r.median < 0.03 for r in result.residuals.values())
    assert result.regret.median <= 0.01 and result.regret.slower <= 0.02
    about = provenance(DEVICE, result, 12.3, "580.1")
    assert {"date", "commit", "driver", "residuals", "regret", "granikv"} <= set(about)
    write(user_path(tmp_path, DEVICE.name), DEVICE, result, about)
    found = find(DEVICE, tmp_path)
    assert found.source == "calibrated" and found.provenance["cells_checked"] == result.checked
    assert found.constants.gemm.rate == pytest.approx(planted().gemm.rate, rel=0.2)
    assert any("UNIFORM" in line for line in summary(result))
    with pytest.raises(GraniKVError, match="--out"):
        write(tmp_path / "calibration" / "test-gpu.json" / "x.json", DEVICE, result, about)


def test_what_was_timed_survives_and_is_not_timed_again(tmp_path):
    path, cells = tmp_path / "raw.jsonl", calibration_grid()[:20]
    about = {"device": DEVICE.name}
    with pytest.raises(RuntimeError):
        measure(cells, Planted(fail_after=17), Lines(path, about), 60, show=False)
    assert len(read_timings(path)) == 17
    path.write_text(path.read_text() + '{"kind": "timing", "cut')
    assert len(read_timings(path)) == 17
    path.write_text(path.read_text().rsplit("\n", 1)[0] + "\n")
    meter, lines = Planted(), Lines(path, about)
    assert measure(cells, meter, lines, 60, show=False)
    wanted = {(c, r) for c in cells for r in regimes_of(c, meter)}
    assert len(meter.timed) == len(wanted) - 17
    assert {(t.cell, t.regime) for t in read_timings(path)} == wanted
    again = Planted()
    assert measure(cells, again, Lines(path, about), 60, show=False) and again.opened == []
    # Another device's lines are not this one's.
    assert Lines(path, {"device": "another"}).timings == []


def test_time_runs_out_and_what_is_there_is_enough_or_said_not_to_be():
    lines = Lines(None, {"device": DEVICE.name})
    assert not measure(calibration_grid(), Planted(), lines, 0.0, show=False)
    assert lines.timings == []
    with pytest.raises(GraniKVError, match=r"0 cells .* --seconds"):
        calibrate(lines, DEVICE)


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "raw.jsonl"
    path.write_text('{"kind": "timing"\n{}\n')
    with pytest.raises(GraniKVError, match=r"raw.jsonl line 1 is not JSON"):
        read_timings(path)


# -- the CPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", CPU_LAYOUTS[:2], ids=lambda x: x.name)
@pytest.mark.parametrize("mixed", [False, True])
def test_on_a_cpu_both_sides_compute_the_same_attention(layout, mixed):
    """What is compared by time has to be the same work."""
    cell, meter = Cell(layout, 2, 3, 40, 9, mixed), CpuMeter(0.0)
    inputs = Inputs(cell)
    uniform = meter.uniform(cell, inputs)().clone()
    inputs._turn = 0
    shared = meter.shared(cell, inputs, Regime.BATCHED_GEMM)()
    assert torch.allclose(uniform, shared, atol=1e-5)
    timing = meter.time(cell, Regime.UNIFORM)
    assert 0 < timing.least <= timing.us <= timing.most and timing.repeats >= 3


def test_what_an_engine_cannot_hold_is_not_timed():
    gpu = Planted()
    assert regimes_of(Cell(LLAMA, 1, 2, 512, 64), gpu) == tuple(Regime)
    assert regimes_of(Cell(LLAMA, 16, 2, 512, 64), gpu) == (Regime.UNIFORM, Regime.BATCHED_GEMM)
    assert regimes_of(Cell(LLAMA, 4, 1, 512, 64), gpu) == (Regime.UNIFORM, Regime.BATCHED_GEMM)
    for cell in {*regret_grid(), *calibration_grid()}:
        if Regime.CASCADE in regimes_of(cell, gpu):
            assert cascade_plan.prefix_arrays(cell.items, cascade_plan.PassLimits(cell.rows)).pairs == cell.rows


def test_on_a_cpu_one_engine_is_timed_once_and_serves_both_regimes():
    meter = CpuMeter(0.0)
    cell = Cell(CPU_LAYOUTS[1], 1, 3, 40, 9)
    assert regimes_of(cell, meter) == (Regime.UNIFORM, Regime.BATCHED_GEMM)
    assert regimes_of(dataclasses.replace(cell, members=1), meter) == (Regime.UNIFORM,)
    timings = [meter.time(cell, regime) for regime in regimes_of(cell, meter)]
    ((_, point),) = points_of(timings, same_engine=True)
    assert point.us[Regime.CASCADE] == point.us[Regime.BATCHED_GEMM]


@pytest.mark.parametrize("cell", [Cell(LLAMA, 3, 4, 100, 7, True), Cell(LLAMA, 2, 3, 50, 60), Cell(LLAMA, 4, 1, 9, 5)])
def test_a_gpus_batch_lies_where_a_cpus_does(cell):
    layers, context = 3, 176
    values = layers * needed_slots(cell) * LLAMA.kv_heads * LLAMA.head_dim
    pool = tuple(torch.arange(values, dtype=torch.float32) for _ in range(2))
    gpu, cpu = cuda.Inputs(cell, pool, context, layers), Inputs(cell)
    assert torch.equal(gpu.seq_lens, cpu.seq_lens) and gpu.req_to_token.dtype == torch.int32
    for row, n in enumerate(cpu.seq_lens.tolist()):
        assert torch.equal(gpu.req_to_token[row, :n], cpu.req_to_token[row, :n])
    assert [x.shape for x in gpu.k] == [cpu.layer()[0].shape] * layers
    assert len({x.data_ptr() for x in gpu.k}) == layers and len(gpu.q) == layers


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_measures_this_cpu_and_a_server_would_use_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRANIKV_CACHE", str(tmp_path))
    small = [c for c in cpu_grid() if c.rows * (c.tokens + c.tail) < 4000]
    assert len(small) >= 16
    monkeypatch.setattr("granikv_sglang.calibrate.cells.cpu_grid", lambda: small)
    monkeypatch.setattr(command, "cpu_grid", lambda: small)
    monkeypatch.setattr("granikv_sglang.calibrate.cpu.CpuMeter", lambda: CpuMeter(0.0))
    raw = tmp_path / "raw.jsonl"
    assert command.main(["--device", "cpu", "--seconds", "60", "--raw", str(raw)]) == 0
    said = capsys.readouterr().out
    assert "written to" in said and "checked on" in said
    from granikv_sglang.plugin.engines import calibration_of  # noqa: PLC0415

    found = calibration_of(cuda=False)
    assert found.source == "calibrated" and found.refused == ()
    assert set(found.constants.regimes) == {Regime.CASCADE, Regime.BATCHED_GEMM}
    assert found.provenance["residuals"]["uniform"]["points"] > 0
    # The same from the raw lines, without measuring.
    out = tmp_path / "again.json"
    assert command.main(["--fit-only", "--raw", str(raw), "--out", str(out)]) == 0
    written = json.loads(next((tmp_path / "calibration").glob("*.json")).read_text())
    assert json.loads(out.read_text())["constants"] == written["constants"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--fit-only"], "--fit-only needs --raw"),
        (["--fit-only", "--raw", "nowhere.jsonl", "--out", "x.json"], "nowhere.jsonl is not there"),
    ],
)
def test_refusals_are_one_line(argv, said, capsys):
    assert command.main(argv) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_timings_of_two_devices_are_not_fitted_together(tmp_path, capsys):
    raw = tmp_path / "raw.jsonl"
    rows = [{"kind": "timing", "device": name} for name in ("a", "b")]
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command.main(["--fit-only", "--raw", str(raw), "--out", str(tmp_path / "x")]) == 2
    assert "timings of a, b; one device is needed" in capsys.readouterr().err
