"""The report: which pictures which points fill, what the page says, and that nothing in it is unescaped."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser

import pytest

from granikv_sglang.bench_serving import plots
from granikv_sglang.bench_serving.page import write_report
from granikv_sglang.bench_serving.plots import tokens
from granikv_sglang.bench_serving.results import table

PROVENANCE = {
    "date": "2026-11-30T00:00:00+0000",
    "commit": "abc1234",
    "device": "2 CPU cores, <b>bold</b>",
    "python": "3.11",
    "versions": {"sglang": "0.5.17"},
    "replay": "python -m granikv_sglang.bench_serving --tag '<script>'",
    "servers": {"stock": {"args": ["--granikv-off"], "dtype": "float32"}},
}


def side(speed, ours):
    metrics = {name: [speed, 0.9 * speed, 1.1 * speed] for name in ("output_throughput", "request_throughput")}
    metrics |= {f"{kind}_{n}_ms": [1.5, 1, 2] for kind in ("mean", "median", "p99") for n in ("ttft", "tpot", "itl")}
    metrics["hot_hit_tokens"] = [12, 12, 12]
    return {
        "metrics": metrics,
        "regimes": {"cascade (memory_bound)": 7} if ours else {},
        "declines": {"too_short": 2} if ours else {},
        "counters": {"promotions": 3, "promoted_tokens": 99} if ours else {},
        "hot_tokens_at_end": 33 if ours else 0,
        "clocks": [{"load_1m": 1.5}],
    }


def point(shape, agents, prefix, valid=True):
    speedup = {"output_throughput": [1.25, 1.2, 1.3]} if valid else None
    gates = [{"name": "outputs", "ok": valid, "text": "2 of 9 differ for no tie"}]
    return {
        **{"kind": "point", "schema": 1, "point": f"{shape} {agents} x {prefix}", "dataset": "multi-agent"},
        **{"shape": shape, "agents": agents, "prefix_tokens": prefix, "prefix_state": "warm", "repetitions": 3},
        "sides": {"stock": side(100, False), "granikv": side(125, True)},
        "baseline": "stock",
        "comparisons": {"granikv": {"valid": valid, "speedup": speedup, "gates": gates}},
        "provenance": PROVENANCE,
    }


GRID = [point("homogeneous", agents, prefix) for agents in (4, 8) for prefix in (256, 1024)]
ALL = [*GRID, point("heterogeneous", 8, 1024), point("none", 8, 64)]


class Page(HTMLParser):
    """Tags that are opened and not closed, pictures, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs))
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def report(records, folder):
    path = write_report(records, folder)
    return Page(path.read_text())


def test_every_picture_is_there_and_on_the_page(tmp_path):
    page = report(ALL, tmp_path)
    names = {"throughput_by_prefix.png", "throughput_by_batch.png", "shapes.png", "speedup.png"}
    assert {image["src"] for image in page.images} == names
    assert all(image["alt"] for image in page.images)
    for name in names:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000
    assert page.open == []
    assert "Valid: all 6 comparisons" in page.text
    assert "1.25x (1.20 to 1.30)" in page.text


def test_all_commits_and_days_of_a_page_are_named_at_its_top(tmp_path):
    later = {**PROVENANCE, "date": "2026-12-01T00:00:00+0000", "commit": "def5678"}
    page = report([*GRID, {**GRID[0], "provenance": later}, GRID[1]], tmp_path)
    assert "2 CPU cores, <b>bold</b> · 2026-11-30, 2026-12-01 · commits abc1234, def5678" in page.text
    assert "· 2026-11-30 · commit abc1234" in report(GRID, tmp_path).text


def test_loads_are_in_order_whichever_file_they_come_from(tmp_path):
    page = report([ALL[5], with_variant(GRID[0], "other", 1.5), *reversed(GRID)], tmp_path)
    loads = re.findall(r"(?:homogeneous|none) \d+ x \d+", page.text.partition("Each point")[0])
    assert loads == [
        "none 8 x 64", *(f"homogeneous {n} x {prefix}" for prefix in (256, 1024) for n in (4, 8)), "homogeneous 4 x 256"
    ]  # fmt: skip


def with_variant(record, name, speed):
    """The record of a run that measured one more side."""
    found = copy.deepcopy(record)
    found["sides"][name] = side(100 * speed, True)
    found["comparisons"][name] = {"valid": True, "gates": [], "speedup": {"output_throughput": [speed, 1.0, 2 * speed]}}
    return found


def test_runs_of_one_load_are_put_together(tmp_path, monkeypatch):
    """Variants from several runs stand in one picture, each by its own run's baseline; the lines show a load once."""
    drawn, figures = [], []
    monkeypatch.setattr(plots, "_above", lambda _place, _x, _y, text, _size: drawn.append(text))
    monkeypatch.setattr(plots, "_save", lambda figure, _folder, picture: figures.append(figure) or picture)
    same = GRID[-1]
    invalid = copy.deepcopy(with_variant(same, "batch", 9.0))
    invalid["comparisons"]["batch"] |= {"valid": False, "speedup": None}
    pictures = plots.draw_all(
        [with_variant(same, "paged", 1.5), *GRID, with_variant(same, "hot", 1.75), invalid], tmp_path
    )
    assert [picture.file for picture in pictures][-1] == "variants.png"
    assert drawn[-3:] == ["1.50x", "1.75x", "1.25x"]
    legend = [text.get_text() for text in figures[-1].legends[0].get_texts()]
    assert legend == ["paged", "hot", "granikv"]
    (lines,) = [figure for figure, picture in zip(figures, pictures, strict=True) if "by_prefix" in picture.file]
    assert all(len(set(xs)) == len(xs) for panel in lines.axes for line in panel.lines if len(xs := line.get_xdata()))


@pytest.mark.parametrize(
    ("records", "pictures"),
    [
        (GRID[:1], set()),
        (GRID[:2], {"throughput_by_prefix.png"}),
        (GRID[::2], {"throughput_by_batch.png"}),
        ([GRID[0], ALL[-1]], {"shapes.png"}),
    ],
    ids=["one point", "two lengths", "two batches", "two shapes"],
)
def test_only_pictures_that_the_points_fill(records, pictures, tmp_path):
    assert {image["src"] for image in report(records, tmp_path).images} == pictures


def test_an_invalid_point_has_no_speedup_anywhere(tmp_path):
    records = [point("homogeneous", 4, 256, valid=False)]
    page = report(records, tmp_path)
    assert "INVALID: 1 of 1" in page.text and "FAILS outputs: 2 of 9 differ for no tie" in page.text
    assert not re.search(r"\d\.\d\dx", page.text)
    text = table(records)
    assert "INVALID" in text and "2 of 9 differ" in text and not re.search(r"\d\.\d\dx", text)


def test_a_run_that_broke_off_says_so_first(tmp_path):
    broken = {"kind": "broken", "schema": 1, "point": "forest 4 x 5", "shape": "forest", "why": "died\n | log"}
    page = report([*GRID, {**broken, "provenance": PROVENANCE}], tmp_path)
    assert "NOT FINISHED: forest 4 x 5" in page.text and "log" in page.text
    assert "NOT FINISHED" in table([{**broken, "provenance": PROVENANCE}])


def test_a_single_server_and_no_latencies_are_fine(tmp_path):
    alone = copy.deepcopy(GRID[0])
    del alone["comparisons"], alone["baseline"]
    alone["sides"] = {"server": alone["sides"]["granikv"]}
    alone["sides"]["server"]["metrics"] = {"output_throughput": [1, 1, 1], "hot_hit_tokens": [0, 0, 0]}
    page = report([alone], tmp_path)
    assert "nothing is compared" in page.text
    assert " - " in re.sub(r"\s+", " ", table([alone]))


def test_what_granikv_did_and_where_it_was_measured_is_told(tmp_path):
    page = report(ALL, tmp_path)
    for text in ("7 cascade (memory_bound)", "not promoted: 2 too_short", "HOT hit tokens 12", "--granikv-off"):
        assert text in page.text
    assert "--tag '<script>'" in page.text and "<b>bold</b>" in page.text
    assert "script" not in page.open


def test_token_counts_read_as_people_say_them():
    assert [tokens(n) for n in (64, 1000, 1024, 16384, 1536)] == ["64", "1000", "1K", "16K", "1536"]


def test_repetitions_that_disagree_are_called_unsteady(tmp_path):
    shaky = copy.deepcopy(GRID[0])
    shaky["comparisons"]["granikv"]["speedup"]["output_throughput"] = [1.2, 0.8, 3.1]
    assert "Unsteady: in 1 of them" in report([shaky, GRID[1]], tmp_path).text
    assert "unsteady" in table([shaky]) and "unsteady" not in table([GRID[1]])
