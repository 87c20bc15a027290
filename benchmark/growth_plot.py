"""Draw how the gain grows, from `engine_decode.py` rows: batch size on one prefix, and prefix length at one batch size.

    python benchmark/engine_decode.py --model DIR --points 1x16K 2x16K ... 64x64K --out benchmark/results/growth.jsonl
    python benchmark/growth_plot.py

Writes docs/img/growth.png and prints the table that docs/results.md holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
BATCH_PREFIX, LENGTH_REQUESTS = 16384, 64


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows with one group each; a later row of the same point replaces an earlier one."""
    found = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if len(row["prefix_tokens"]) == 1:
            found[row["requests"], row["prefix_tokens"][0]] = row
    return [found[key] for key in sorted(found)]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one line a point."""
    ours, stock = rows[0]["step_ms"]
    lines = [
        f"| requests | prefix | step ms, {ours} / {stock} | step speed-up (range) | tokens/s | equal outputs |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["step_speedup_range"]
        cells = (
            str(row["requests"]),
            str(row["prefix_tokens"][0]),
            f"{row['step_ms'][ours]:.2f} / {row['step_ms'][stock]:.2f}",
            f"{row['step_speedup']:.2f} ({low:.2f} - {high:.2f})",
            f"{row['rate_speedup']:.2f}",
            row["equal_outputs"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Two panels of step time on both sides, with the speed-up written at each point."""
    ours, stock = rows[0]["step_ms"]
    panels = [
        ("requests", f"Requests on one prefix of {BATCH_PREFIX // 1024}K tokens",
         [(r["requests"], r) for r in rows if r["prefix_tokens"][0] == BATCH_PREFIX]),
        ("shared prefix, tokens", f"{LENGTH_REQUESTS} requests, by length of their prefix",
         [(r["prefix_tokens"][0], r) for r in rows if r["requests"] == LENGTH_REQUESTS]),
    ]  # fmt: skip
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, (label, title, points) in zip(axes, panels, strict=True):
        xs = [x for x, _ in points]
        for side, colour, marker in ((stock, "#b5541c", "s"), (ours, "#1f6f8b", "o")):
            axis.plot(xs, [r["step_ms"][side] for _, r in points], color=colour, marker=marker, label=side)
        for x, row in points:
            axis.annotate(
                f"{row['step_speedup']:.2f}x", (x, row["step_ms"][stock]), (0, 7), textcoords="offset points",
                ha="center", fontsize=8,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xticks(xs, [f"{x // 1024}K" if x >= 1024 else str(x) for x in xs])
        axis.set_ylim(0, 1.14 * max(max(r["step_ms"].values()) for _, r in points))
        axis.set(xlabel=label, ylabel="decode step, ms", title=title)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left")
    row = rows[0]
    figure.suptitle(
        f"Llama-3.1-8B shapes, dummy weights, {row['gpu']}, SGLang {row['sglang']}, CUDA graphs on; "
        f"numbers: stock / GraniKV ({row['commit']})",
        fontsize=9,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=HERE / "results" / "growth.jsonl")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "img" / "growth.png")
    args = parser.parse_args()
    rows = rows_of(args.rows)
    draw(rows, args.out)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
