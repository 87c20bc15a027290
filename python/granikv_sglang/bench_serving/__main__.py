"""Entry of ``python -m granikv_sglang.bench_serving``."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence

from granikv_sglang.core import GraniKVError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done and valid, 1 the run failed, 2 the command line is wrong, 3 INVALID, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Importing SGLang's benchmark takes seconds, and warns of what this platform lacks: no matter to a client.
    warnings.filterwarnings("ignore", module=r"sglang\.")
    from granikv_sglang.bench_serving import app  # noqa: PLC0415

    try:
        try:
            job = app.planned(arguments)
        except GraniKVError as error:
            print(f"granikv: {error}", file=sys.stderr)
            return 2
        return app.run(job)
    except GraniKVError as error:
        print(f"granikv: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output has had enough (| head): nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("granikv: interrupted; the servers are stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Every way of being ended takes the path of Ctrl-C, which stops the servers.
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.exit(main())
