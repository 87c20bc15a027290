"""`python -m granikv_sglang.embedded`: make sure the embedded model is there, and print its folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from granikv_sglang.embedded import EmbeddedModelError, ensure_model


def main(argv: list[str] | None = None) -> int:
    """Print the folder on stdout. Exit status 1, with one line on stderr, when the model cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m granikv_sglang.embedded", description=__doc__)
    parser.add_argument("--cache-dir", type=Path, help="instead of $GRANIKV_CACHE or ~/.cache/granikv")
    parser.add_argument("--verify", action="store_true", help="compare the hash of every file, not only the sizes")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(argv)
    try:
        print(ensure_model(options.cache_dir, progress=not options.quiet, verify=options.verify))
    except EmbeddedModelError as error:
        print(f"granikv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("granikv: interrupted; nothing half-made was left behind", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
