"""Do tensor-parallel ranks stay in step? A server under churn for 10,000 decode passes and more.

    python benchmark/ranks_churn.py --tp 4                                  (CPU: gloo, the tests' model of two layers)
    python benchmark/ranks_churn.py --tp 4 --model DIR --scale 40 --args "--load-format dummy"             (GPU: NCCL)

Clients send groups of agents on prefixes that come back, nest and give way to others, abort some, and flush now and
then. Every rank compares its decisions and its answers' tokens with all others each 32 passes and at each promotion,
and stops at the first difference, so a run that comes to its end is the proof. What the server counted is printed as
one JSON line; exit status 1 where it died.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tqdm import tqdm

from granikv_sglang.core import GraniKVError, commit
from granikv_sglang.server.process import Server, free_ports, serving
from support.tiny import tiny_model

VOCABULARY = 400
CLIENTS = 3
PREFIXES = 10
COUNTED = ("promotions", "hot_evictions", "hot_splits", "room_evictions", "regime_switches", "rank_comparisons")


class Client(threading.Thread):
    """Sends one wave of groups after another until told to stop; ``error`` is what ended it early."""

    def __init__(self, server: Server, number: int, scale: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.server, self.scale, self.stop = server, scale, stop
        self.rng = random.Random(number)
        self.sent = self.aborted = self.flushed = 0
        self.error = ""

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.wave()
        except (OSError, HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
            self.stop.set()

    def ids(self, seed: int, count: int) -> list[int]:
        """The same text for the same seed, whoever asks."""
        rng = random.Random(seed)
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    def wave(self) -> None:
        """A few groups at once; sometimes a request is aborted on the way, sometimes the cache is flushed behind."""
        rng, prompts, lengths = self.rng, [], []
        for _ in range(rng.randint(1, 3)):
            team = rng.randrange(PREFIXES)
            prefix = self.ids(team, (30 + 17 * team) * self.scale)
            if rng.random() < 0.5:
                prefix += self.ids(1000 + team, 24 * self.scale)  # a role below the team
            for _ in range(rng.randint(1, 6)):
                cut = len(prefix) if rng.random() < 0.85 else rng.randint(1, len(prefix))
                prompts.append(prefix[:cut] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 20))])
                lengths.append(rng.randint(4, 64))
        names = [f"{self.ident}-{self.sent + i}" for i in range(len(prompts))]
        if rng.random() < 0.3:
            self.aborted += 1
            threading.Timer(rng.uniform(0, 1), self._abort, (rng.choice(names),)).start()
        params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in lengths]
        self.server.post("/generate", {"rid": names, "input_ids": prompts, "sampling_params": params}, timeout=600)
        self.sent += len(prompts)
        if rng.random() < 0.03:
            try:
                self.server.post("/flush_cache", parse=False)
                self.flushed += 1
            except OSError:
                pass  # refused while the others' requests run

    def _abort(self, name: str) -> None:
        try:
            self.server.post("/abort_request", {"rid": name}, parse=False)
        except OSError:
            self.stop.set()  # the main thread says why


@contextmanager
def clients(server: Server, scale: int) -> Iterator[list[Client]]:
    stop = threading.Event()
    made = [Client(server, number, scale, stop) for number in range(CLIENTS)]
    for client in made:
        client.start()
    try:
        yield made
    finally:
        stop.set()
        for client in made:
            client.join(600)


def decode_passes(state: dict[str, Any]) -> int:
    counters = state["counters"]
    return int(counters["plans_built"] + counters["plans_reused"])


def churn(server: Server, passes: int, scale: int) -> dict[str, Any]:
    """Load until ``passes`` decode passes have run. Raises GraniKVError when the server ends first."""
    begin = time.monotonic()
    with clients(server, scale) as made, tqdm(total=passes, unit="pass", disable=None) as bar:
        done = 0
        while done < passes and all(client.is_alive() for client in made):
            time.sleep(1)
            done = decode_passes(server.granikv_state())
            bar.update(min(done, passes) - bar.n)
    errors = [client.error for client in made if client.error]
    if errors:
        raise GraniKVError(f"the server did not last: {errors[0]}{server.last_words()}")
    state = server.granikv_state()
    return {
        "decode_passes": decode_passes(state),
        "shared_passes": state["counters"]["shared_steps"],
        **{name: state["counters"][name] for name in COUNTED},
        "requests": sum(client.sent for client in made),
        "aborts": sum(client.aborted for client in made),
        "flushes": sum(client.flushed for client in made),
        "seconds": round(time.monotonic() - begin),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="ranks")
    parser.add_argument("--passes", type=int, default=10_000, help="decode passes")
    parser.add_argument("--model", help="folder with config.json; default: the two-layer model of the tests")
    parser.add_argument("--scale", type=int, default=1, help="lengthens all prefixes, which are 30 to 207 tokens")
    parser.add_argument("--args", default="", help="more arguments of the launcher, in one string")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="granikv-ranks-") as name:
        folder = Path(name)
        model = options.model or str(tiny_model(folder / "model", heads=(8, 4)))
        # A pool of a few prefixes, so that they push each other out.
        flags = ["--model-path", model, "--tp", str(options.tp), "--skip-tokenizer-init", *shlex.split(options.args)]
        flags += ["--max-running-requests", "24", "--max-total-tokens", str(1536 * options.scale + 2048)]
        server = Server("granikv", free_ports(1)[0], [*flags, "--granikv-min-tokens", str(32 * options.scale)], folder)
        try:
            with serving(server):
                found = churn(server, options.passes, options.scale)
        except GraniKVError as error:
            print(f"granikv: {error}", file=sys.stderr)
            return 1
    about = {"tp": options.tp, "model": options.model or "tiny", "date": time.strftime("%Y-%m-%d"), "commit": commit()}
    line = json.dumps({**about, **found})
    print(line)
    if options.out:
        with options.out.open("a") as out:
            out.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
