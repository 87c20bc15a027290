"""The report as one HTML page beside its PNG files: verdict, table, pictures, details, provenance."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from granikv_sglang.bench_serving.plots import Picture, draw_all
from granikv_sglang.bench_serving.results import UNSTEADY, granikv_lines, in_order, milliseconds, steady
from granikv_sglang.bench_serving.runner import SHOWN

Record = Mapping[str, Any]
PAGE = "index.html"

_STYLE = """
:root { --ink: #37352f; --soft: #6f6e69; --line: #e3e2de; --ground: #fff; --good: #1c6b45; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e5e2; --soft: #a3a29d; --line: #3b3a37; --ground: #191918; --good: #6cc195; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
p, figcaption { max-width: 46rem; } .soft, figcaption { color: var(--soft); font-size: .9rem; }
.verdict { border-left: 5px solid var(--good); padding: .4rem .9rem; margin: 1rem 0; }
.verdict.bad { border-color: var(--bad); } .bad b, b.bad { color: var(--bad); } b.good { color: var(--good); }
.scroll { overflow-x: auto; }
table { font-size: .92rem; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; } th:first-child, td:first-child, td.text { text-align: left; } td.text { white-space: normal; }
td.text { min-width: 14rem; }
figure { margin: 1rem 0 2rem; } img { display: block; max-width: 100%; height: auto; background: #fff;
  border: 1px solid var(--line); border-radius: 6px; }
details { border-bottom: 1px solid var(--line); padding: .5rem 0; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; padding: .7rem; border: 1px solid var(--line);
  border-radius: 6px; font-size: .85rem; } ul { padding-left: 1.2rem; }
"""


def write_report(records: Sequence[Record], folder: Path) -> Path:
    """Draw the pictures and write the page; returns its path. Raises OSError when the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    records = in_order(records)
    pictures = draw_all(records, folder)
    path = folder / PAGE
    path.write_text(page(records, pictures), encoding="utf-8")
    return path


def page(records: Sequence[Record], pictures: Sequence[Picture]) -> str:
    """The whole page as text. Everything that comes from records is escaped."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>GraniKV serving benchmark</title><style>{_STYLE}</style></head><body>",
        "<h1>GraniKV serving benchmark</h1>",
        f'<p class="soft">{_e(_origin(records))}</p>',
        _verdict(records),
        "<h2>Results</h2>",
        _overview(records),
        *(_figure(picture) for picture in pictures),
        "<h2>Each point</h2>",
        *(_details(record) for record in records),
        "<h2>How it was measured</h2>",
        _method(records),
        "<h2>Where it was measured, and how to repeat it</h2>",
        _provenance(records),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _origin(records: Sequence[Record]) -> str:
    """Devices, days and commits of all results: files of several runs may be on one page."""
    about = [record["provenance"] for record in records]
    days = sorted({a["date"][:10] for a in about})
    commits = list(dict.fromkeys(a["commit"] for a in about))
    named = f"{'commits' if len(commits) > 1 else 'commit'} {', '.join(commits)}"
    return " · ".join([*dict.fromkeys(a["device"] for a in about), ", ".join(days), named])


def _verdict(records: Sequence[Record]) -> str:
    broken = [record for record in records if record["kind"] == "broken"]
    comparisons = [(r, name, c) for r in records for name, c in r.get("comparisons", {}).items()]
    bad = [(record, name, c) for record, name, c in comparisons if not c["valid"]]
    if broken:
        why = _e(broken[0]["why"].splitlines()[0])
        return f'<div class="verdict bad"><b>NOT FINISHED</b>: {_e(broken[0]["point"])}. {why}</div>'
    if bad:
        record, name, comparison = bad[0]
        gate = next(gate for gate in comparison["gates"] if not gate["ok"])
        text = f"{len(bad)} of {len(comparisons)} comparisons failed a gate; no speed-up is given for them. First: "
        first = f"{record['point']}, {name}: {gate['name']}: {gate['text']}"
        return f'<div class="verdict bad"><b>INVALID</b>: {_e(text + first)}</div>'
    if not comparisons:
        return '<div class="verdict">One server was measured; nothing is compared.</div>'
    text = (
        f'<div class="verdict"><b class="good">Valid</b>: all {len(comparisons)} comparisons passed every gate (output '
        "tokens, finished requests, outputs, retractions, cache state, clocks)."
    )
    unsteady = sum(not steady(comparison) for _, _, comparison in comparisons)
    if unsteady:
        text += f" <b>Unsteady</b>: in {unsteady} of them {_e(UNSTEADY)}"
    return text + "</div>"


def _overview(records: Sequence[Record]) -> str:
    """A row for each point and side: throughput with its range, and the speed-up where it is valid."""
    rows = []
    for record in records:
        if record["kind"] == "broken":
            told = '<b class="bad">not finished</b>'
            rows.append(f'<tr><td>{_e(record["point"])}</td><td colspan="6" class="text">{told}</td></tr>')
            continue
        for place, (name, side) in enumerate(record["sides"].items()):
            metrics = side["metrics"]
            cells = [
                _e(record["point"]) if place == 0 else "",
                _e(name),
                *_speedups(record, name),
                _median(metrics, "output_throughput", 1),
                _median(metrics, "decode_throughput", 1),
                _median(metrics, "request_throughput", 2),
            ]
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = (
        *("load", "side", "speed-up (range)", "decode speed-up (range)"),
        *("output tokens/s", "decode tokens/s", "requests/s"),
    )
    header = "".join(f"<th>{title}</th>" for title in head)
    note = (
        "Medians of the repetitions. Speed-ups are medians of the ratios within a repetition, of output tokens/s over "
        "the whole run and of decode tokens/s while all requests decode. A load is called by its shape, requests and "
        "prefix tokens."
    )
    return f'<div class="scroll"><table><tr>{header}</tr>{"".join(rows)}</table></div><p class="soft">{note}</p>'


def _speedups(record: Record, side: str) -> tuple[str, str]:
    comparison = record.get("comparisons", {}).get(side)
    if comparison is None:
        return "", ""
    if not comparison["valid"]:
        return '<b class="bad">INVALID</b>', ""
    first, second = (
        "<b>{:.2f}x</b> ({:.2f} to {:.2f})".format(*comparison["speedup"][key]) if key in comparison["speedup"] else "-"
        for key in ("output_throughput", "decode_throughput")
    )
    return first, second


def _figure(picture: Picture) -> str:
    image = f'<img src="{_e(picture.file)}" width="{picture.width}" alt="{_e(picture.text)}">'
    return f"<figure><h3>{_e(picture.heading)}</h3>{image}<figcaption>{_e(picture.text)}</figcaption></figure>"


def _details(record: Record) -> str:
    if record["kind"] == "broken":
        summary = f"<summary>{_e(record['point'])}: not finished</summary>"
        return f"<details open>{summary}<pre>{_e(record['why'])}</pre></details>"
    body = [_latencies(record)]
    did = [line for name, side in record["sides"].items() for line in granikv_lines(name, side)]
    if did:
        body.append("<h3>What GraniKV did</h3><ul>" + "".join(f"<li>{_e(line)}</li>" for line in did) + "</ul>")
    for name, comparison in record.get("comparisons", {}).items():
        items = "".join(
            f'<li><b class="{"good" if gate["ok"] else "bad"}">{"holds" if gate["ok"] else "FAILS"}</b> '
            f"{_e(gate['name'])}: {_e(gate['text'])}</li>"
            for gate in comparison["gates"]
        )
        body.append(f"<h3>Gates, {_e(name)} against {_e(record['baseline'])}</h3><ul>{items}</ul>")
    body.append(f"<h3>Clocks and load while it ran</h3><ul>{_clocks(record)}</ul>")
    state = f"{record['prefix_state']} cache, {record['repetitions']} repetitions"
    summary = f"<summary>{_e(record['point'])} <span class='soft'>{_e(state)}</span></summary>"
    return f"<details>{summary}{''.join(body)}</details>"


def _latencies(record: Record) -> str:
    head = "<th>side</th>" + "".join(
        f"<th>{name.upper()} {kind}</th>" for name in SHOWN for kind in ("mean", "p50", "p99")
    )
    rows = []
    for name, side in record["sides"].items():
        cells = [
            milliseconds(side["metrics"][key][0]) if key in side["metrics"] else "-"
            for latency in SHOWN
            for key in (f"{kind}_{latency}_ms" for kind in ("mean", "median", "p99"))
        ]
        rows.append(f"<tr><td>{_e(name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f'<h3>Latencies, milliseconds</h3><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _clocks(record: Record) -> str:
    items = []
    for name, side in record["sides"].items():
        keys = list(dict.fromkeys(key for clock in side["clocks"] for key in clock))
        values = ", ".join(f"{key} {' / '.join(f'{c[key]:g}' for c in side['clocks'] if key in c)}" for key in keys)
        items.append(f"<li>{_e(name)}: {_e(values or 'not recorded')}</li>")
    return "".join(items)


def _method(records: Sequence[Record]) -> str:
    states = {
        "cold": "flushed before each repetition",
        "warm": "flushed before each repetition, then each shared prefix read once by a request of its own",
        "steady": "flushed before each repetition, then one whole unmeasured run with other private parts",
    }
    used = dict.fromkeys(record["prefix_state"] for record in records if record["kind"] == "point")
    caches = "; ".join(f"{state}: {states[state]}" for state in used)
    notes = [
        "The servers take turns, A B A B; every repetition has fresh private parts, the same on all sides.",
        f"Cache, the same on all sides: {caches}." if caches else "",
        "Output tokens/s counts from the first request to the last token, prefill of the private parts included.",
        "TTFT is time to first token, TPOT time per output token after the first, ITL the gap between two tokens.",
        "Where outputs differ, both servers are asked for the two likeliest tokens there; only a tie explains it.",
    ]
    return "<ul>" + "".join(f"<li>{_e(note)}</li>" for note in notes if note) + "</ul>"


def _provenance(records: Sequence[Record]) -> str:
    blocks = []
    # Results of several commands may be put together in one page.
    for about in {record["provenance"]["replay"]: record["provenance"] for record in records}.values():
        versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
        facts = [
            f"{about['device']}; Python {about['python']}; {versions}",
            f"{about['date']}, commit {about['commit']}",
        ]
        for name, server in about.get("servers", {}).items():
            told = ", ".join(f"{key} {value}" for key, value in server.items() if key != "args")
            args = " ".join(server["args"]) or "found running"
            facts.append(f"{name}: {args} ({told})")
        if about.get("collectors"):
            told = ", ".join(f"{name} {state}" for name, state in about["collectors"].items())
            facts.append(f"Python's garbage collector (SGLang's /freeze_gc after the warm-up): {told}")
        items = "".join(f"<li>{_e(fact)}</li>" for fact in facts)
        blocks.append(f"<ul>{items}</ul><pre>{_e(about['replay'])}</pre>")
    return "".join(blocks)


def _median(metrics: Mapping[str, Sequence[float]], key: str, digits: int) -> str:
    return f"{metrics[key][0]:,.{digits}f}" if key in metrics else "-"


def _e(text: object) -> str:
    return html.escape(str(text))
