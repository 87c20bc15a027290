"""Rows of the serving benchmark's results for the documentation: the loads, and what each part of GraniKV adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Titles of the columns, and the rows."""

PARTS = {
    "batch-global": "the peer: shares only what the whole batch has in common",
    "cascade-paged": "multi-group cascade over the paged pool, HOT off",
    "cascade-hot": "the same over HOT",
    "grouped-hot": "the grouped kernel over HOT",
    "granikv": "all of GraniKV: prefill over HOT too, regimes chosen",
}
"""Sides of the decomposition, in the order in which parts are added."""


def loads(records: Iterable[Record]) -> Rows:
    """A row for each load without variants: speed-ups with their ranges, latencies of both sides, medians."""
    points = [record for record in records if record["kind"] == "point" and len(record["comparisons"]) == 1]
    rows = []
    for point in points:
        ((name, comparison),) = point["comparisons"].items()
        stock, ours = (point["sides"][side]["metrics"] for side in (point["baseline"], name))
        times = [
            f"{stock[key][0]:.{digits}f} / {ours[key][0]:.{digits}f}"
            for key, digits in (("output_throughput", 0), ("median_ttft_ms", 0), ("median_tpot_ms", 2))
        ]
        rows.append((point["point"], times[0], *_ratios(comparison), *times[1:], *_about(point, comparison)))
    latencies = ("TTFT p50, ms", "TPOT p50, ms")
    titles = ("load", "tokens/s", "speed-up (range)", "while all decode (range)", *latencies, "equal outputs", "commit")
    return titles, rows


def decomposition(records: Iterable[Record]) -> Rows:
    """A row for each load and part; GraniKV whole ran beside each part, so it has a row for each of these runs."""
    points = [record for record in records if record["kind"] == "point" and len(record["comparisons"]) > 1]
    rows = []
    for load in dict.fromkeys(point["point"] for point in points):
        for part, said in PARTS.items():
            for point in points:
                if point["point"] == load and part in point["comparisons"]:
                    comparison = point["comparisons"][part]
                    rows.append((load, said, *_ratios(comparison), *_about(point, comparison)))
    return ("load", "what runs", "speed-up (range)", "while all decode (range)", "equal outputs", "commit"), rows


def _ratios(comparison: Record) -> list[str]:
    found = comparison["speedup"]
    return [
        "{:.2f} ({:.2f} - {:.2f})".format(*found[key]) if key in found else ""
        for key in ("output_throughput", "decode_throughput")
    ]


def _about(point: Record, comparison: Record) -> tuple[str, str]:
    """Equal outputs, and the commit."""
    outputs = next(gate["text"] for gate in comparison["gates"] if gate["name"] == "outputs")
    return outputs.removesuffix(" equal"), point["provenance"]["commit"]
