"""Draws what benchmark/regret.py judged: the regret table in docs/classifier.md and a map of chosen regimes.

Usage: PYTHONPATH=python:kernels:benchmark python benchmark/regret_plot.py JUDGED.jsonl [--docs docs]

Writes ``img/regimes.png`` (needs matplotlib) and the part of ``classifier.md`` between ``<!-- regret -->`` and
``<!-- end: regret -->`` in the folder of the documentation.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from granikv_sglang.calibrate.cells import LENGTHS, LLAMA, MEMBERS, Cell
from granikv_sglang.calibrate.meter import read_rows
from granikv_sglang.core import Regime
from granikv_sglang.plan.fit import quantile

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- regret -->", "<!-- end: regret -->"
COLOURS = {Regime.UNIFORM: "#c8ccd2", Regime.CASCADE: "#5b9bd5", Regime.BATCHED_GEMM: "#f0a35e"}
Row = dict[str, Any]


def slices() -> list[tuple[str, Callable[[Cell], bool]]]:
    """Rows of the table: which cells."""
    heads = [(32, 8), (40, 8), (8, 1), (9, 3)]
    return [
        ("all", lambda c: True),
        *((f"heads {q}/{kv}", lambda c, own=(q, kv): (c.layout.q_heads, c.layout.kv_heads) == own) for q, kv in heads),
        ("1 to 4 members", lambda c: c.members <= 4),
        ("8 to 32 members", lambda c: 8 <= c.members <= 32),
        ("64 and 128 members", lambda c: c.members >= 64),
        ("prefix up to 2K", lambda c: c.tokens <= 2048),
        ("prefix 4K to 8K", lambda c: 4096 <= c.tokens <= 8192),
        ("prefix 16K and 32K", lambda c: c.tokens >= 16384),
        ("2 to 16 groups", lambda c: c.groups > 1),
        ("tails above 256", lambda c: c.tail > 256),
    ]  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """The regret table in Markdown; a fixed choice for every cell stands beside the classifier's."""
    cells = [(Cell.from_json(row["cell"]), row) for row in rows]
    lines = [
        "| cells | how many | median | 95% below | worst | slower than UNIFORM by at most | always UNIFORM: median | "
        "always BATCHED_GEMM: median, 95% below |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, belongs in slices():
        own = [row for cell, row in cells if belongs(cell)]
        if own:
            lines.append(_line(name, own))
    return "\n".join(lines)


def _line(name: str, own: Sequence[Row]) -> str:
    regrets = sorted(row["regret"] for row in own)
    uniform = sorted(row["us"]["uniform"] / min(row["us"].values()) - 1 for row in own)
    gemm = sorted(row["us"]["batched_gemm"] / min(row["us"].values()) - 1 for row in own if "batched_gemm" in row["us"])
    slower = max(0.0, *(row["over_uniform"] for row in own))
    fixed = f"{statistics.median(gemm):.1%}, {quantile(gemm, 0.95):.0%}" if gemm else ""
    return (
        f"| {name} | {len(own)} | {statistics.median(regrets):.2%} | {quantile(regrets, 0.95):.1%} | {regrets[-1]:.1%} "
        f"| {slower:.1%} | {statistics.median(uniform):.0%} | {fixed} |"
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """A map over members and length, one group on 32/8 heads: colour is the choice, the number how much faster than
    UNIFORM it was measured, and a frame marks a cell where another regime was more than 2% better."""
    import matplotlib  # noqa: PLC0415  (an extra)

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415
    from matplotlib.patches import Patch, Rectangle  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for row in rows:
        cell = Cell.from_json(row["cell"])
        if cell.layout != LLAMA or cell.groups != 1 or cell.tail != 256 or cell.tokens not in LENGTHS:
            continue
        x, y = MEMBERS.index(cell.members), LENGTHS.index(cell.tokens)
        regime = Regime(row["chosen"])
        off = row["regret"] > 0.02
        edge = {"edgecolor": "#c0392b", "linewidth": 2, "zorder": 2} if off else {"edgecolor": "white", "linewidth": 1}
        axes.add_patch(Rectangle((x - 0.49, y - 0.49), 0.98, 0.98, facecolor=COLOURS[regime], **edge))
        gain = 1 / (1 + row["over_uniform"])
        axes.text(x, y, f"{gain:.1f}x" if regime is not Regime.UNIFORM else "1x", ha="center", va="center", fontsize=9)
    axes.set_xlim(-0.5, len(MEMBERS) - 0.5)
    axes.set_ylim(-0.5, len(LENGTHS) - 0.5)
    axes.set_xticks(range(len(MEMBERS)), [str(m) for m in MEMBERS])
    axes.set_yticks(range(len(LENGTHS)), [f"{n // 1024}K" if n >= 1024 else str(n) for n in LENGTHS])
    axes.set_xlabel("requests that share the prefix")
    axes.set_ylabel("tokens of the prefix")
    device = rows[0]["device"] if rows else ""
    axes.set_title(f"Regime chosen and speed-up over UNIFORM, one attention layer, 32/8 heads, {device}", fontsize=10)
    handles = [Patch(facecolor=colour, label=regime.value) for regime, colour in COLOURS.items()]
    handles.append(Patch(facecolor="white", edgecolor="#c0392b", label="another was over 2% faster"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def fill(page: Path, rows: Sequence[Row]) -> None:
    """Put table and picture into the page. Raises SystemExit where it has no place for them."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"regret_plot: {page} needs {BEGIN} and {END} exactly once")
    before, rest = text.split(BEGIN)
    said = f"{rows[0]['device']}; constants: {rows[0]['table']}."
    picture = "![Regime chosen for each number of members and prefix length](img/regimes.png)"
    page.write_text(f"{before}{BEGIN}\n{said}\n\n{table(rows)}\n\n{picture}\n{END}{rest.split(END)[1]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("judged", type=Path)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    rows = [row for row in read_rows(args.judged) if row.get("kind") == "judged"]
    if not rows:
        raise SystemExit(f"regret_plot: {args.judged} holds no judged cell; make it with regret.py --out")
    draw(rows, args.docs / "img" / "regimes.png")
    fill(args.docs / "classifier.md", rows)
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
