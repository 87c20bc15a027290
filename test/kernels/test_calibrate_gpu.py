"""The calibration's meter and the layer timer on a GPU: one attention three times, sane times, events in graphs."""

import pytest
import torch

from granikv_sglang.backends.timer import EventTimer, events_work_in_graphs
from granikv_sglang.calibrate.cells import GPU_LAYOUTS, Cell
from granikv_sglang.core import Regime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def replayed(meter, cell, regime):
    """The output of a layer as a replayed graph gives it."""
    layer, get_ready = meter.recorded(cell, regime)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(0)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(0)
    get_ready()
    graph.replay()
    torch.cuda.synchronize()
    return out.float().clone()


@pytest.mark.parametrize("layout", GPU_LAYOUTS, ids=lambda x: x.name)
def test_the_three_regimes_that_are_timed_compute_the_same(layout):
    from granikv_sglang.calibrate.cuda import CudaMeter  # noqa: PLC0415

    cells = [Cell(layout, 1, 5, 700, 65), Cell(layout, 3, 16, 1000, 64, mixed=True), Cell(layout, 4, 1, 500, 70)]
    meter = CudaMeter()
    meter.open(layout, cells)
    for cell in cells:
        regimes = [r for r in Regime if cell.members > 1 or r is not Regime.CASCADE]
        outs = [replayed(meter, cell, regime) for regime in regimes]
        for out in outs[1:]:
            assert torch.isfinite(out).all()
            assert ((out - outs[0]).norm() / outs[0].norm()).item() < 1e-2
        times = [meter.time(cell, regime) for regime in regimes]
        assert all(0 < t.least <= t.us <= t.most for t in times)


def test_events_in_a_graph_time_the_layer_of_each_replay():
    timer, key = EventTimer(0), (Regime.UNIFORM, 1)
    x = torch.randn(4096, 4096, device="cuda")

    def recorded():
        timer.start(key)
        for _ in range(4):
            x.mm(x)
        timer.stop(key)

    assert events_work_in_graphs()
    recorded()  # as a warm-up without a capture does
    torch.cuda.synchronize()
    assert timer.read(key) > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    inside = timer.read(key)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    outside = begin.elapsed_time(end) * 1e3
    assert 0 < timer.read(key) <= outside
    assert inside == pytest.approx(timer.read(key), rel=0.5)
