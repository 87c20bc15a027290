"""What a person reads: transcript, tables, and the JSON line. Plain text; bold only on a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from granikv_sglang.demo.client import Answer
from granikv_sglang.demo.compare import Verdict
from granikv_sglang.demo.measure import METHOD, Speed, steady, total
from granikv_sglang.demo.teams import TEAMS, answer_text


def width() -> int:
    """Columns to use: those of the terminal, within 60 and 100; 80 without one."""
    return max(60, min(100, shutil.get_terminal_size((80, 24)).columns))


def bold(text: str) -> str:
    """``text`` in bold on a terminal, as it is elsewhere and where NO_COLOR is set."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return f"\x1b[1m{text}\x1b[0m"
    return text


def heading(text: str) -> str:
    """A heading with an empty line before it."""
    return "\n" + bold(text)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with two spaces between columns; columns of numbers are set to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(headers))]
    widths = [
        max(len(header), *(len(row[i]) for row in cells)) if cells else len(header) for i, header in enumerate(headers)
    ]

    def line(values: Sequence[str]) -> str:
        padded = [v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True)]
        return ("  " + "  ".join(padded)).rstrip()

    return "\n".join([line(headers), line(["-" * w for w in widths]), *(line(row) for row in cells)])


def introduction(per_team: int, max_tokens: int) -> str:
    """What is about to happen."""
    text = (
        f"{len(TEAMS)} teams of {per_team} agents; the agents of a team share one long prefix. A real model answers "
        f"them on this machine's CPU, {max_tokens} tokens each, through GraniKV and, to compare, through stock SGLang."
    )
    return textwrap.fill(text, width())


def transcript_entry(answer: Answer) -> str:
    """One agent: team, role, question and answer, wrapped."""
    agent = answer.agent
    lines = [heading(f"[{agent.team}] {agent.role}")]
    for mark, text in (("Q", agent.question), ("A", answer_text(answer.text) or "(empty)")):
        lines.append(textwrap.fill(text, width(), initial_indent=f"  {mark}: ", subsequent_indent="     "))
    return "\n".join(lines)


def groups(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """HOT extents that are a prefix group: as long as a promotion asks for, and at least two live members.

    The few tokens with which every chat prompt begins are an extent of their own, common to all groups; not a group.
    """
    shortest = snapshot.get("options", {}).get("min_tokens", 0)
    return [e for e in snapshot.get("extents", []) if e["tokens"] >= shortest and e["members"] >= 2]


def hot_report(snapshot: dict[str, Any], delta: dict[str, Any]) -> str:
    """Tables of what HOT did: extents while all agents decoded, then passes by regime.

    ``snapshot`` is GraniKV's state at that time, ``delta`` the counters of the run (see :func:`counters_between`).
    """
    extents = [(i, e["start"], e["tokens"], e["members"]) for i, e in enumerate(snapshot.get("extents", []), 1)]
    common = len(extents) > len(groups(snapshot)) > 0
    passes = [
        (regime, reason, count)
        for regime, reasons in delta.get("steps", {}).items()
        for reason, count in reasons.items()
        if count
    ]
    lines = [
        heading("What HOT did"),
        table(("extent", "first slot", "tokens", "members"), extents) if extents else "  (no prefix became HOT)",
        *(["  (the shortest is the opening of the chat format, common to both teams)"] if common else []),
        "",
        table(("regime", "reason", "passes"), passes),
        "",
        f"  promotions {delta.get('promotions', 0)} ({delta.get('promoted_tokens', 0)} tokens copied once); "
        f"declined {sum(delta.get('declines', {}).values())}",
        f"  prefix bytes not re-read: {human_bytes(delta.get('bytes_not_reread', 0))} "
        f"in {delta.get('shared_steps', 0)} shared steps",
    ]
    return "\n".join(lines)


def speed_report(speeds: Sequence[tuple[Speed, Speed]], seconds: Sequence[tuple[float, float]]) -> str:
    """The comparison with stock, each pair GraniKV first, one pair a round.

    ``speeds`` is empty where a round had too few joint steps; ``seconds`` is the whole round, prefill included.
    """
    rows = []
    for number, whole in enumerate(seconds):
        for i, name in enumerate(("GraniKV", "stock SGLang")):
            speed = speeds[number][i] if len(speeds) == len(seconds) else None
            decode = f"{speed.tokens} tokens in {speed.seconds:.1f} s" if speed else "-"
            rate = f"{speed.per_second:.1f}" if speed else "-"
            rows.append((number + 1, name, f"{whole[i]:.1f} s", decode, rate))
    lines = [
        heading("Against stock SGLang, same requests, same flags"),
        table(("round", "side", "in all", "decode", "tokens/s"), rows),
        "",
    ]
    if speeds:
        ours, stock = (total(side).per_second for side in zip(*speeds, strict=True))
        lines.append(f"  decode: {ours:.1f} against {stock:.1f} tokens/s, " + bold(f"{ours / stock:.2f} times stock"))
        if not steady(speeds):
            text = (
                "The rounds disagree, other programs used the cores: do not rely on this speed, run on an idle machine."
            )
            lines.append(textwrap.fill(text, width(), initial_indent="  ", subsequent_indent="  "))
    else:
        lines.append("  decode speed not measured: too few joint steps, ask for more --max-tokens")
    lines.append(textwrap.fill(f"({METHOD})", width(), initial_indent="  ", subsequent_indent="  "))
    return "\n".join(lines)


def equality_report(requests: int, tokens: int, verdicts: Sequence[tuple[Answer, Verdict]]) -> str:
    """Whether the tokens are stock's, and one line for each request where they are not."""
    same = requests - len(verdicts)
    lines = [f"  tokens equal to stock: {same} of {requests} answers" + (f", {tokens} tokens" if not verdicts else "")]
    for answer, verdict in verdicts:
        name = "tie" if verdict.tie else "DIFFERENT"
        text = f"{name}: [{answer.agent.team}] {answer.agent.role}: {verdict.text}"
        lines.append(textwrap.fill(text, width(), initial_indent="  ", subsequent_indent="    "))
    return "\n".join(lines)


def counters_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What the counters of two states grew by; nested counts too."""
    result: dict[str, Any] = {}
    for key, value in after.items():
        earlier = before.get(key)
        if isinstance(value, dict):
            result[key] = counters_between(earlier if isinstance(earlier, dict) else {}, value)
        else:
            result[key] = value - (earlier or 0)
    return result


def human_bytes(count: int) -> str:
    """A number of bytes with a unit, 1000-based."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
