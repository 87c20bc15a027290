"""From turns to numbers: medians with ranges, paired speed-ups, JSON lines, the table on the terminal."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from granikv_sglang.bench_serving.gates import Gate, Turn
from granikv_sglang.bench_serving.runner import SHOWN, BrokenOff, Point
from granikv_sglang.core import GraniKVError
from granikv_sglang.demo.measure import STEADY

SCHEMA = 1
UNSTEADY = f"the repetitions are more than {STEADY:g}x apart; measure again on an idle machine."
RATIOS = ("output_throughput", "request_throughput", "decode_throughput")
MEDIANS = (
    *RATIOS,
    *(f"{kind}_{name}_ms" for name in SHOWN for kind in ("mean", "median", "p99")),
    "seconds",
    "cached_tokens",
    "hot_hit_tokens",
    "output_tokens",
    "retractions",
)


def side_summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """One side over its repetitions: ``{metric: [median, lowest, highest]}``, and its counters added up."""
    summary: dict[str, Any] = {"metrics": {}}
    for name in MEDIANS:
        values = [value for turn in turns if (value := turn.metrics.get(name)) is not None]
        if len(values) == len(turns):
            summary["metrics"][name] = [_round(v) for v in (statistics.median(values), min(values), max(values))]
    summary["regimes"], summary["declines"] = _passes(turns), _total(turns, "declines")
    # What is read of HOT prefixes, in the counters' own words; a stock server has none.
    plain = Counter[str]()
    for turn in turns:
        plain.update({k: v for k, v in turn.counters.items() if isinstance(v, int) and k != "hot_tokens_at_end"})
    summary["counters"] = dict(plain)
    summary["hot_tokens_at_end"] = max((turn.counters.get("hot_tokens_at_end", 0) for turn in turns), default=0)
    summary["clocks"] = [dict(turn.clocks) for turn in turns]
    return summary


def speedups(ours: Sequence[Turn], stock: Sequence[Turn]) -> dict[str, list[float]]:
    """``{metric: [median, lowest, highest]}`` of the ratios ours / baseline, paired by repetition."""
    found = {}
    for name in RATIOS:
        pairs = [(a.metrics.get(name), b.metrics.get(name)) for a, b in zip(ours, stock, strict=True)]
        ratios = [a / b for a, b in pairs if a is not None and b]
        if ratios and len(ratios) == len(pairs):
            found[name] = [_round(v) for v in (statistics.median(ratios), min(ratios), max(ratios))]
    return found


def steady(comparison: Mapping[str, Any]) -> bool:
    """Whether the repetitions agree on the speed-up; if not, the machine had something else to do."""
    speedup = (comparison["speedup"] or {}).get("output_throughput")
    return speedup is None or speedup[2] <= STEADY * speedup[1]


def point_record(
    point: Point, turns: Sequence[Sequence[Turn]], gates: Mapping[str, Sequence[Gate]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything the report says about one point, JSON-ready. No speed-up is in it where a gate failed."""
    record: dict[str, Any] = {
        "kind": "point",
        "schema": SCHEMA,
        "point": point.name,
        **point.facts,
        "prefix_state": point.state,
        "repetitions": len(turns[0]),
        "sides": {side[0].side: side_summary(side) for side in turns},
    }
    if len(turns) > 1:
        record["baseline"] = turns[0][0].side
        record["comparisons"] = {}
        for side in turns[1:]:
            checked = gates[side[0].side]
            valid = all(gate.ok for gate in checked)
            record["comparisons"][side[0].side] = {
                "valid": valid,
                "speedup": speedups(side, turns[0]) if valid else None,
                "gates": [{"name": gate.name, "ok": gate.ok, "text": gate.text} for gate in checked],
            }
    return record | {"provenance": dict(about)}


def broken_record(point: Point, error: GraniKVError, about: Mapping[str, Any]) -> dict[str, Any]:
    """A point that could not be measured to its end, with the requests of its last turn that came back."""
    outputs = error.outputs if isinstance(error, BrokenOff) else ()
    return {
        "kind": "broken",
        "schema": SCHEMA,
        "point": point.name,
        **point.facts,
        "why": str(error),
        "requests": [{"rid": o.rid, "ok": o.success, "tokens": len(o.token_ids), "error": o.error} for o in outputs],
        "provenance": dict(about),
    }


def turn_record(point: Point, turn: Turn, details: bool) -> dict[str, Any]:
    """One repetition of one side; with ``details`` each request's fate and tokens."""
    record: dict[str, Any] = {
        "kind": "turn",
        "schema": SCHEMA,
        "point": point.name,
        "side": turn.side,
        "repetition": turn.repetition,
        "prefix_state": turn.state,
        "metrics": dict(turn.metrics),
        "clocks": dict(turn.clocks),
        "counters": dict(turn.counters),
        "errors": sorted({answer.error for answer in turn.answers if answer.error}),
    }
    if details:
        record["requests"] = [
            {"rid": a.rid, "ok": a.ok, "prompt_len": a.prompt_len, "cached": a.cached, "token_ids": list(a.token_ids)}
            for a in turn.answers
        ]
    return record


@dataclass(frozen=True)
class Lines:
    """The JSON lines file; each record is on disk before the next is measured."""

    path: Path
    details: bool

    def add(self, record: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def turn(self, point: Point, turn: Turn) -> None:
        self.add(turn_record(point, turn, self.details))


def load(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Point and broken records of JSON lines files. Raises GraniKVError on a file that is none."""
    records = []
    for path in paths:
        try:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                record = json.loads(line)
                if record["schema"] != SCHEMA:
                    raise GraniKVError(f"{path}, line {number} has schema {record['schema']}, {SCHEMA} is needed")
                if record["kind"] in ("point", "broken"):
                    records.append(record)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GraniKVError(f"{path} is no results file of this benchmark: {error}") from error
    if not records:
        raise GraniKVError(f"no finished point in {', '.join(map(str, paths))}")
    return records


def in_order(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Loads of a shape by prefix and requests, whichever run they come from; those with variants; what broke off."""
    shapes = list(dict.fromkeys(record.get("shape") for record in records))

    def place(record: Mapping[str, Any]) -> tuple[float, ...]:
        sides = len(record.get("sides", ()))
        size = (record.get("prefix_tokens") or 0, record.get("agents") or 0)
        return (record["kind"] == "broken", sides > 2, shapes.index(record.get("shape")), *size)

    return sorted(records, key=place)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """The results as text, a block for each point. An invalid comparison has reasons in place of speed-ups."""
    lines: list[str] = []
    for record in records:
        if record["kind"] == "broken":
            lines += ["", f"{record['point']}: NOT FINISHED", f"  {record['why'].splitlines()[0]}"]
            continue
        lines += ["", f"{record['point']} ({record['prefix_state']} cache, {record['repetitions']} repetitions)"]
        lines.append(
            f"  {'side':<14}{'out tok/s':>11}{'req/s':>9}{'decode t/s':>12}   "
            + "".join(f"{f'{name.upper()} mean/p50/p99 ms':<27}" for name in SHOWN)
        )
        lines += [_side_line(name, side) for name, side in record["sides"].items()]
        for name, side in record["sides"].items():
            lines += [f"  {text}" for text in granikv_lines(name, side)]
        for name, comparison in record.get("comparisons", {}).items():
            lines += _comparison_lines(name, record["baseline"], comparison)
    return "\n".join(lines).lstrip("\n")


def _side_line(name: str, side: Mapping[str, Any]) -> str:
    metrics = side["metrics"]

    def shown(key: str, width: int, digits: int) -> str:
        return f"{metrics[key][0]:>{width}.{digits}f}" if key in metrics else f"{'-':>{width}}"

    def times(latency: str) -> str:
        keys = [f"{kind}_{latency}_ms" for kind in ("mean", "median", "p99")]
        return " / ".join(milliseconds(metrics[key][0]) if key in metrics else "-" for key in keys)

    throughput = shown("output_throughput", 11, 1) + shown("request_throughput", 9, 2)
    decode = shown("decode_throughput", 12, 1)
    return f"  {name:<14}{throughput}{decode}   {''.join(f'{times(latency):<27}' for latency in SHOWN)}".rstrip()


def milliseconds(value: float) -> str:
    """A time with about three digits: nobody reads tenths of a millisecond of a second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def granikv_lines(name: str, side: Mapping[str, Any]) -> list[str]:
    """What GraniKV did in all repetitions of a point, in one line each; nothing for a stock server."""
    counters = side["counters"]
    if not side["regimes"]:
        return []
    lines = [
        f"{name}: HOT holds {side['hot_tokens_at_end']} tokens at the end, {counters.get('promotions', 0)} promotions "
        f"of {counters.get('promoted_tokens', 0)} tokens, HOT hit tokens {side['metrics']['hot_hit_tokens'][0]:.0f} a "
        f"repetition, {counters.get('bytes_not_reread', 0) / 1e9:.2f} GB not read again"
    ]
    passes = ", ".join(f"{n} {label}" for label, n in sorted(side["regimes"].items(), key=lambda kv: (-kv[1], kv[0])))
    lines.append(f"{name}: passes: {passes}")
    if side["declines"]:
        declined = ", ".join(f"{n} {reason}" for reason, n in sorted(side["declines"].items()))
        lines.append(f"{name}: not promoted: {declined}")
    return lines


def _comparison_lines(name: str, baseline: str, comparison: Mapping[str, Any]) -> list[str]:
    if not comparison["valid"]:
        failed = [gate for gate in comparison["gates"] if not gate["ok"]]
        return [f"  {name} against {baseline}: INVALID", *(f"    {gate['name']}: {gate['text']}" for gate in failed)]
    parts = [
        f"{label} {comparison['speedup'][key][0]:.2f}x ({comparison['speedup'][key][1]:.2f} to "
        f"{comparison['speedup'][key][2]:.2f})"
        for key, label in (("output_throughput", "output tokens/s"), ("decode_throughput", "decode tokens/s"))
        if key in comparison["speedup"]
    ]
    # The rest of the gates have nothing to add on a terminal; the page has them all.
    told = [gate["text"] for gate in comparison["gates"] if gate["name"] in ("outputs", "cache state", "clocks")]
    mark = [] if steady(comparison) else [f"    unsteady: {UNSTEADY}"]
    return [f"  {name} against {baseline}: {', '.join(parts)}", *mark, f"    all gates hold: outputs {'; '.join(told)}"]


def _passes(turns: Sequence[Turn]) -> dict[str, int]:
    """Forward passes by ``regime (reason)`` over all turns."""
    passes = Counter[str]()
    for turn in turns:
        for regime, reasons in turn.counters.get("steps", {}).items():
            passes.update({f"{regime} ({reason})": count for reason, count in reasons.items()})
    return dict(passes)


def _total(turns: Sequence[Turn], key: str) -> dict[str, int]:
    total = Counter[str]()
    for turn in turns:
        total.update(turn.counters.get(key, {}))
    return dict(total)


def _round(value: float) -> float:
    """Four significant digits and more where the number is large: what repeats can tell apart."""
    return round(value, 3 if abs(value) < 1000 else 1)
