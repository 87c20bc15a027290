"""Command line of the demo."""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from granikv_sglang.core import GraniKVError

DEFAULT_MAX_TOKENS = 48
FEWEST_TOKENS, MOST_TOKENS = 16, 512


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code: 0, 1 for a failure in one line on stderr, 130 when interrupted."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Every way of being ended takes the path of Ctrl-C, which stops the servers.
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        # transformers and openai take seconds to import: not before the options are known to be good.
        options = _parse(argv)
        from granikv_sglang.demo.run import Options, run  # noqa: PLC0415

        return run(Options(options.requests_per_team, options.max_tokens, options.json_only))
    except GraniKVError as error:
        print(f"granikv: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        # A fault of the demo itself: still one line, and the place for whoever mends it.
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        print(f"granikv: the demo itself failed at {place}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("granikv: interrupted; the servers are stopped", file=sys.stderr)
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    from granikv_sglang.demo.teams import MOST_PER_TEAM  # noqa: PLC0415

    parser = argparse.ArgumentParser(
        prog="python -m granikv_sglang.demo",
        description="Two teams of agents, each with a long prefix of its own, answered by a real model on the CPU: "
        "through GraniKV, then through stock SGLang.",
    )
    parser.add_argument(
        "--requests-per-team",
        type=_whole(2, MOST_PER_TEAM),
        default=MOST_PER_TEAM,
        metavar="N",
        help=f"agents of each team, 2 to {MOST_PER_TEAM} (default: {MOST_PER_TEAM})",
    )
    parser.add_argument(
        "--max-tokens",
        type=_whole(FEWEST_TOKENS, MOST_TOKENS),
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"tokens of each answer, {FEWEST_TOKENS} to {MOST_TOKENS} (default: {DEFAULT_MAX_TOKENS})",
    )
    parser.add_argument("--json-only", action="store_true", help="print the last line only, the JSON object")
    return parser.parse_args(argv)


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"a whole number from {low} to {high} is needed, got {text!r}")
        return value

    return parse


if __name__ == "__main__":
    sys.exit(main())
