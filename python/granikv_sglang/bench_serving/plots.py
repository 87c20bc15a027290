"""The report's pictures, from point records. Each function writes one PNG, or says that the points do not fill it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

Record = Mapping[str, Any]
Span = tuple[float, float, float]
"""Median, lowest and highest."""

COLOURS = ("#8a8f98", "#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a")
"""Baseline first, grey: what is compared stands out from what it is compared with. Told apart in grey print too."""
MARKERS = ("s", "o", "^", "D", "v", "P")
INK = "#37352f"
MOST_PANELS = 5
DPI = 192
CSS_DPI = 96
"""A CSS pixel is 1/96 inch: letters come out at their size in points, twice as sharp."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG of the report: file name, heading, what it shows (also for who cannot see it), width in CSS pixels."""

    file: str
    heading: str
    text: str
    width: int = 0


def draw_all(records: Sequence[Record], folder: Path) -> list[Picture]:
    """Every picture that the points fill, written into ``folder``."""
    points = [record for record in records if record["kind"] == "point" and record.get("dataset") == "multi-agent"]
    # A load that several runs measured: the lines and bars show the first.
    once: dict[str, Record] = {}
    for point in points:
        once.setdefault(point["point"], point)
    pictures = [draw(tuple(once.values()), folder) for draw in (_by_prefix, _by_batch, _shapes, _grid)]
    return [picture for picture in (*pictures, _variants(points, folder)) if picture is not None]


def _by_prefix(points: Sequence[Record], folder: Path) -> Picture | None:
    return _lines(
        points,
        folder,
        axis="prefix_tokens",
        panel="agents",
        panel_title=lambda value: f"{value} requests at once",
        x_label="shared prefix, tokens",
        picture=Picture(
            "throughput_by_prefix.png",
            "Throughput against prefix length",
            "Output tokens per second of each side over the length of the one shared prefix, a panel for each number "
            "of requests. Bars are the lowest and highest repetition; hollow marks are invalid comparisons.",
        ),
    )


def _by_batch(points: Sequence[Record], folder: Path) -> Picture | None:
    return _lines(
        points,
        folder,
        axis="agents",
        panel="prefix_tokens",
        panel_title=lambda value: f"prefix of {tokens(value)} tokens",
        x_label="requests at once",
        picture=Picture(
            "throughput_by_batch.png",
            "Throughput against batch",
            "Output tokens per second of each side over the number of requests at once, a panel for each prefix. "
            "Bars are the lowest and highest repetition; hollow marks are invalid comparisons.",
        ),
    )


def _lines(
    points: Sequence[Record],
    folder: Path,
    *,
    axis: str,
    panel: str,
    panel_title: Callable[[int], str],
    x_label: str,
    picture: Picture,
) -> Picture | None:
    """Lines over ``axis`` in a panel for each value of ``panel``, of the homogeneous points."""
    panels: dict[int, list[Record]] = defaultdict(list)
    for point in points:
        if point["shape"] == "homogeneous":
            panels[point[panel]].append(point)
    wide = [value for value in sorted(panels) if len(panels[value]) > 1]
    if not wide:
        return None
    if len(wide) > MOST_PANELS:
        step = (len(wide) - 1) / (MOST_PANELS - 1)
        wide = [wide[round(i * step)] for i in range(MOST_PANELS)]
    figure = Figure(figsize=(max(5.2, (3.1 if len(wide) < 4 else 2.4) * len(wide) + 1), 3.9), layout="constrained")
    axes = figure.subplots(1, len(wide), sharey=True, squeeze=False)[0]
    for place, value in zip(axes, wide, strict=True):
        rows = sorted(panels[value], key=lambda point: point[axis])
        for number, side in enumerate(_sides(rows)):
            _line(place, number, side, rows, axis)
        place.set_title(panel_title(value), fontsize=10, color=INK)
        place.set_xscale("log", base=2)
        ticks = [row[axis] for row in rows]
        place.set_xticks(ticks, [tokens(tick) for tick in ticks])
        place.xaxis.set_minor_locator(NullLocator())
        place.xaxis.set_minor_formatter(NullFormatter())
        place.margins(x=0.12)
        _plain(place)
    # Shared by all panels, so after the last line is drawn: a limit set before would cut it off.
    axes[0].set_ylim(
        0, 1.08 * max(_throughput(row, side)[2] for v in wide for row in panels[v] for side in row["sides"])
    )
    axes[0].set_ylabel("output tokens per second", color=INK)
    figure.supxlabel(x_label, fontsize=10, color=INK)
    _legend(figure, axes[0], 3 if len(wide) == 1 else 6)
    return _save(figure, folder, picture)


def _line(place: Axes, number: int, side: str, rows: Sequence[Record], axis: str) -> None:
    rows = [row for row in rows if side in row["sides"]]
    where = [row[axis] for row in rows]
    middle, low, high = zip(*(_throughput(row, side) for row in rows), strict=True)
    colour = COLOURS[number % len(COLOURS)]
    spread = [[m - v for m, v in zip(middle, low, strict=True)], [v - m for m, v in zip(middle, high, strict=True)]]
    place.errorbar(where, middle, yerr=spread, color=colour, lw=2, capsize=3, label=side, zorder=2)
    for x, y, row in zip(where, middle, rows, strict=True):
        face = colour if _valid(row, side) else "white"
        place.plot(
            [x], [y], MARKERS[number % len(MARKERS)], color=colour, mfc=face, mew=1.6, ms=6, zorder=3, label="_point"
        )


def _shapes(points: Sequence[Record], folder: Path) -> Picture | None:
    """Bars of every side for each shape, homogeneous points with the same number of requests beside them."""
    others = [point for point in points if point["shape"] != "homogeneous"]
    if not others:
        return None
    shown = [*_beside(points, others), *others]
    sides = _sides(shown)
    groups = [
        (_name(point), {side: (_throughput(point, side), _speedup_text(point, side)) for side in point["sides"]})
        for point in shown
    ]
    figure, place = _bars(groups, {side: COLOURS[number % len(COLOURS)] for number, side in enumerate(sides)}, 4.3)
    place.set_ylabel("output tokens per second", color=INK)
    _plain(place)
    _legend(figure, place, 6)
    return _save(
        figure,
        folder,
        Picture(
            "shapes.png",
            "Heterogeneous against homogeneous",
            "Output tokens per second of each side for each shape of load, at the same number of requests where there "
            "is a homogeneous point with it. Above a bar: the speed-up against the baseline, median of repetitions.",
        ),
    )


def _variants(points: Sequence[Record], folder: Path) -> Picture | None:
    """Bars of every side's speed-up on the loads that variants were measured on; runs of one load are put together."""
    loads: dict[str, list[Record]] = defaultdict(list)
    for point in points:
        if len(point.get("comparisons", {})) > 1:
            loads[point["point"]].append(point)
    if not loads:
        return None
    # The whole comes last: it is what the parts add up to.
    whole, *parts = _sides([point for rows in loads.values() for point in rows])[1:]
    colours = {side: COLOURS[number % len(COLOURS)] for number, side in enumerate(parts, start=2)}
    groups = []
    for rows in loads.values():
        bars = {}
        for side in (*parts, whole):
            known = [v for row in rows if (v := _speedups_of(row, side)) is not None]
            if known:
                middle = median(m for m, _, _ in known)
                span = (middle, min(low for _, low, _ in known), max(high for _, _, high in known))
                bars[side] = (span, f"{middle:.2f}x")
        groups.append((_name(rows[0]), bars))
    figure, place = _bars(groups, {**colours, whole: COLOURS[1]}, 4.0, least=1.0)
    place.axhline(1, color=COLOURS[0], lw=1.5)
    place.set_ylabel(f"output tokens per second against {next(iter(loads.values()))[0]['baseline']}", color=INK)
    _plain(place, "{:.1f}x")
    _legend(figure, place, 3)
    text = (
        "Output tokens per second of GraniKV and of its variants, against the baseline in the same run; bars are the "
        "lowest and highest repetition. The grey line is the baseline."
    )
    return _save(figure, folder, Picture("variants.png", "What each part adds", text))


def _bars(
    groups: Sequence[tuple[str, Mapping[str, tuple[Span, str]]]],
    colours: Mapping[str, str],
    height: float,
    least: float = 0.0,
) -> tuple[Figure, Axes]:
    """For each name a group of bars by side, each with its range and a text above; the axis spans ``least`` or more."""
    width = 0.8 / len(colours)
    figure = Figure(
        figsize=(max(5.2, 1.1 + len(groups) * max(1.25, 0.55 * len(colours))), height), layout="constrained"
    )
    place = figure.subplots()
    top = max([least, *(span[2] for _, bars in groups for span, _ in bars.values())])
    for number, (side, colour) in enumerate(colours.items()):
        label = side
        for at, (_, bars) in enumerate(groups):
            if side not in bars:
                continue
            (middle, low, high), text = bars[side]
            x = at + (number - (len(colours) - 1) / 2) * width
            place.bar(x, middle, width * 0.92, color=colour, label=label)
            label = "_bar"  # one of each side in the legend
            place.errorbar(x, middle, yerr=[[middle - low], [high - middle]], color=INK, lw=1, capsize=2)
            _above(place, x, high + 0.02 * top, text, 8)
    place.set_xticks(range(len(groups)), [name for name, _ in groups], fontsize=8.5)
    place.set_ylim(0, top * 1.15)
    return figure, place


def _beside(points: Sequence[Record], others: Sequence[Record]) -> list[Record]:
    """For each number of requests of ``others`` the homogeneous point whose prefix is nearest to their longest."""
    found: list[Record] = []
    for count in sorted({point["agents"] for point in others}):
        longest = max(point["prefix_tokens"] for point in others if point["agents"] == count)
        same = [point for point in points if point["shape"] == "homogeneous" and point["agents"] == count]
        found += sorted(same, key=lambda point: abs(point["prefix_tokens"] - longest))[:1]
    return found


def _grid(points: Sequence[Record], folder: Path) -> Picture | None:
    """Speed-up over prefix length and requests, a panel for each side that is compared."""
    grid = {(p["prefix_tokens"], p["agents"]): p for p in points if p["shape"] == "homogeneous" and "comparisons" in p}
    lengths, counts = sorted({length for length, _ in grid}), sorted({count for _, count in grid})
    if len(lengths) < 2 or len(counts) < 2:
        return None
    sides = list(dict.fromkeys(side for point in grid.values() for side in point["comparisons"]))
    figure = Figure(
        figsize=(max(4.6, (0.95 * len(counts) + 1.2) * len(sides)), 0.55 * len(lengths) + 1.7), layout="constrained"
    )
    axes = figure.subplots(1, len(sides), squeeze=False)[0]
    known = [v for side in sides for point in grid.values() if (v := _speedup(point, side)) is not None]
    span = max([abs(v - 1) for v in known] + [0.25])
    for place, side in zip(axes, sides, strict=True):
        for row, length in enumerate(lengths):
            for column, count in enumerate(counts):
                point = grid.get((length, count))
                value = _speedup(point, side) if point is not None else None
                _cell(place, column, row, _shade(value, span), "" if point is None else _speedup_text(point, side))
        place.set_xlim(-0.5, len(counts) - 0.5)
        place.set_ylim(-0.5, len(lengths) - 0.5)
        place.set_xticks(range(len(counts)), [str(count) for count in counts])
        place.set_yticks(range(len(lengths)), [tokens(length) for length in lengths])
        place.set_title(f"{side} against {next(iter(grid.values()))['baseline']}", fontsize=10, color=INK)
        place.set_xlabel("requests at once", color=INK)
        place.tick_params(length=0, colors=INK)
        for spine in place.spines.values():
            spine.set_visible(False)
    axes[0].set_ylabel("shared prefix, tokens", color=INK)
    text = (
        "Output tokens per second against the baseline, one shared prefix, median of the repetitions. Blue is faster."
    )
    return _save(figure, folder, Picture("speedup.png", "Speed-up over prefix length and batch", text))


def _cell(place: Axes, column: int, row: int, colour: tuple[float, float, float], text: str) -> None:
    place.fill(
        [column - 0.48, column + 0.48, column + 0.48, column - 0.48], [row - 0.46] * 2 + [row + 0.46] * 2, color=colour
    )
    dark = 0.3 * colour[0] + 0.6 * colour[1] + 0.1 * colour[2] < 0.55
    place.text(column, row, text, ha="center", va="center", fontsize=9, color="white" if dark else INK)


def _shade(value: float | None, span: float) -> tuple[float, float, float]:
    """White at 1, towards blue when faster, towards orange when slower; grey when there is no valid number."""
    if value is None:
        return (0.9, 0.9, 0.9)
    end = (0.04, 0.43, 0.60) if value >= 1 else (0.85, 0.45, 0.05)
    share = min(1.0, abs(value - 1) / span)
    red, green, blue = (1 - share * (1 - part) for part in end)
    return (red, green, blue)


def _sides(points: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(side for point in points for side in point["sides"]))


def _throughput(point: Record, side: str) -> tuple[float, float, float]:
    middle, low, high = point["sides"][side]["metrics"]["output_throughput"]
    return middle, low, high


def _valid(point: Record, side: str) -> bool:
    """A side that is compared is valid by its gates, the baseline when any comparison with it is."""
    comparisons = point.get("comparisons", {})
    if side in comparisons:
        return bool(comparisons[side]["valid"])
    return not comparisons or any(comparison["valid"] for comparison in comparisons.values())


def _speedup(point: Record | None, side: str) -> float | None:
    speedups = _speedups_of(point or {}, side)
    return speedups[0] if speedups is not None else None


def _speedups_of(point: Record, side: str) -> tuple[float, float, float] | None:
    """Median, lowest and highest; None where the comparison is not valid or there is none."""
    speedup = point.get("comparisons", {}).get(side, {}).get("speedup") or {}
    if "output_throughput" not in speedup:
        return None
    middle, low, high = speedup["output_throughput"]
    return middle, low, high


def _speedup_text(point: Record, side: str) -> str:
    value = _speedup(point, side)
    if value is not None:
        return f"{value:.2f}x"
    return "INVALID" if side in point.get("comparisons", {}) else ""


def _name(point: Record) -> str:
    return f"{point['shape']}\n{point['agents']} on {tokens(point['prefix_tokens'])}"


def tokens(count: float) -> str:
    """``16384`` as 16K; numbers that are no whole K in full."""
    return f"{count // 1024:.0f}K" if count >= 1024 and count % 1024 == 0 else f"{count:g}"


def _above(place: Axes, x: float, y: float, text: str, size: float) -> None:
    place.text(x, y, text, ha="center", va="bottom", fontsize=size, color=INK)


def _plain(place: Axes, number: str = "{:,.0f}") -> None:
    place.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: number.format(value)))
    place.grid(axis="y", color="#e6e6e4", lw=0.8)
    place.set_axisbelow(True)
    place.tick_params(colors=INK, length=0)
    for name, spine in place.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color("#c8c7c3")


def _legend(figure: Figure, place: Axes, columns: int) -> None:
    handles, labels = place.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=9.5)


def _save(figure: Figure, folder: Path, picture: Picture) -> Picture:
    FigureCanvasAgg(figure)
    # No date or version in the file: the same results give the same bytes.
    figure.savefig(folder / picture.file, dpi=DPI, facecolor="white", metadata={"Software": None})
    return replace(picture, width=round(figure.get_figwidth() * CSS_DPI))
