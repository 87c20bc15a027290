"""Soak: random multi-agent load with aborts, disconnects and flushes for ``SOAK_S`` seconds (two minutes by default).

At the end: no slot is lost, no answer of a sample differs from a stock server's, memory is flat. ``make soak`` runs
it for half an hour. The server is the session's: a small pool, strict checks while busy, forced retraction, our audit.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

from granikv_sglang.demo.teams import TEAMS
from granikv_sglang.server.process import HOST, Server
from support.load import Reply, Request, compare, generate, run

SECONDS = float(os.environ.get("SOAK_S", "120"))
CLIENTS = 6
SAMPLE = 0.15
LIMIT_SAMPLE = 60
"""Answers compared with stock, at most: each costs a stock run."""

WARM = 0.4
"""Share of the time after which memory is first looked at: caches of torch and Python have filled by then."""


@dataclass
class Tally:
    """What the clients have done; shared by their threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    done: dict[str, int] = field(default_factory=dict)
    sampled: dict[str, tuple[Request, Reply]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    log_from: int = 0
    """Where the server's log ended at the start: others have tested malformed requests on this server before."""

    def add(self, what: str) -> None:
        with self.lock:
            self.done[what] = self.done.get(what, 0) + 1


class Client(threading.Thread):
    """One client that does one random thing after another until the time is over."""

    def __init__(self, server: Server, text: list[int], tally: Tally, number: int, until: float) -> None:
        super().__init__(daemon=True)
        self.server, self.text, self.tally, self.number, self.until = server, text, tally, number, until
        self.rng = random.Random(1000 + number)
        self.count = 0

    def run(self) -> None:
        actions = [self.ask, self.ask, self.ask, self.ask, self.abort, self.hang_up, self.long_prompt, self.flush]
        while time.monotonic() < self.until:
            action = self.rng.choice(actions)
            try:
                action()
                self.tally.add(action.__name__)
            except Exception as error:
                self.tally.errors.append(f"{action.__name__}: {type(error).__name__}: {error}")
                return

    def request(self, low: int = 3, high: int = 20) -> Request:
        """A member of one of three teams, of a role in it, or on the first part of its prompt only."""
        rng = self.rng
        team = rng.randrange(3)
        start, length = ((0, 170), (500, 260), (1100, 340))[team]
        prefix = self.text[start : start + length]
        kind = rng.random()
        if kind < 0.3:
            prefix = prefix + self.text[start + length :][: 40 + 20 * rng.randrange(3)]
        elif kind < 0.45:
            prefix = prefix[: rng.randrange(20, length)]
        self.count += 1
        question = self.text[2000 + rng.randrange(800) :][: rng.randint(2, 25)]
        ids = (*prefix, 100 + rng.randrange(300), *question)
        key = rng.choice([None, None, None, "tenant-b"])
        return Request(f"s{self.number}-{self.count}", str(team), ids, rng.randint(low, high), key)

    def ask(self) -> None:
        request = self.request()
        reply = generate(self.server, request)
        assert len(reply.token_ids) == request.max_new_tokens, "an answer is too short"
        with self.tally.lock:
            if self.rng.random() < SAMPLE and len(self.tally.sampled) < LIMIT_SAMPLE:
                self.tally.sampled[request.rid] = (request, reply)

    def abort(self) -> None:
        request = self.request(60, 200)
        timer = threading.Timer(
            self.rng.uniform(0, 2), self.server.post, ("/abort_request", {"rid": request.rid}, 60, False)
        )
        timer.start()
        self.server.post("/generate", body_of(request), timeout=120)
        timer.join()

    def hang_up(self) -> None:
        """Read a few pieces of a stream, then go away."""
        request = self.request(60, 200)
        connection = http.client.HTTPConnection(HOST, self.server.port, timeout=120)
        body = json.dumps({**body_of(request), "stream": True})
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        for _ in range(self.rng.randrange(6)):
            reply.readline()
        connection.close()

    def long_prompt(self) -> None:
        """Most of the pool at once."""
        start = self.rng.randrange(1500)
        ids = tuple(self.text[start:][: self.rng.randrange(700, 1500)])
        self.server.post("/generate", body_of(Request("", "long", ids, 3)), timeout=240)

    def flush(self) -> None:
        """Refused while others run; a client may ask nevertheless."""
        try:
            self.server.post("/flush_cache", parse=False)
        except OSError:
            self.tally.add("flushes refused")


def body_of(request: Request) -> dict[str, object]:
    body: dict[str, object] = {
        "input_ids": list(request.input_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": request.max_new_tokens, "ignore_eos": True},
    }
    return {**body, "rid": request.rid} if request.rid else body


def memory(server: Server) -> float:
    """Resident memory of the server's processes, MiB."""
    top = psutil.Process(server._process.pid)
    return sum(p.memory_info().rss for p in [top, *top.children(recursive=True)]) / (1 << 20)


@pytest.fixture(scope="module")
def soaked(granikv, stock, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = [token for team in TEAMS for token in tokenizer(team.prefix)["input_ids"]]
    begin = time.monotonic()
    tally = Tally(log_from=Path(granikv.log).stat().st_size)
    before = granikv.granikv_state()["counters"]
    clients = [Client(granikv, text, tally, number, begin + SECONDS) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    sizes: list[float] = []
    while any(client.is_alive() for client in clients):
        time.sleep(min(5.0, SECONDS / 20))
        if time.monotonic() - begin > WARM * SECONDS:
            sizes.append(memory(granikv))
        if tally.errors:
            break
    for client in clients:
        client.join(300)
    assert not tally.errors, tally.errors
    after = granikv.granikv_state()
    return tally, sizes, before, after, time.monotonic() - begin


def test_the_soak_did_what_it_is_for(soaked, record_property, capsys):
    tally, sizes, before, after, seconds = soaked
    counters = {name: after["counters"][name] - before[name] for name in before if isinstance(before[name], int)}
    report = {
        "seconds": round(seconds),
        "done": tally.done,
        "sampled": len(tally.sampled),
        "memory_mib": [round(sizes[0]), round(max(sizes)), round(sizes[-1])],
        "largest_free_run": after["pool"]["largest_free_run"],
        **{name: counters[name] for name in ("promotions", "hot_splits", "hot_evictions", "audits", "engine_faults")},
    }
    record_property("soak", json.dumps(report))
    with capsys.disabled():
        print(f"\nsoak: {json.dumps(report)}")
    assert {"ask", "abort", "hang_up", "long_prompt", "flush"} <= tally.done.keys()
    # How much there is of it grows with the time given; two minutes on two busy cores are some thirty requests.
    assert counters["promotions"] >= 1 + SECONDS // 300
    assert counters["hot_evictions"] >= SECONDS // 600
    assert counters["shared_steps"] > 10
    assert counters["engine_faults"] == 0


def test_no_answer_of_the_sample_differs_from_stock(soaked, stock):
    sampled = soaked[0].sampled
    assert len(sampled) >= 3
    ours = {rid: reply for rid, (_, reply) in sampled.items()}
    theirs = run(stock, [request for request, _ in sampled.values()])
    assert compare(ours, theirs).wrong == ()


def test_no_slot_is_lost(soaked, granikv):
    """SGLang's check at idle and our audit have run all along; here the books are closed."""
    deadline = time.monotonic() + 60
    while True:
        try:
            granikv.post("/flush_cache", parse=False)
            break
        except OSError:
            assert time.monotonic() < deadline, "the server is never idle after the soak"
            time.sleep(0.5)
    state = granikv.granikv_state()
    assert state["pool"]["free"] == state["pool"]["slots"] == state["pool"]["largest_free_run"]
    assert state["extents"] == []
    log = Path(granikv.log).read_bytes()[soaked[0].log_from :].decode(errors="replace")
    assert "Traceback" not in log
    assert "leak" not in log.lower()


def test_memory_is_flat(soaked):
    """From the warm part's first third to its last: growth below 5% of the server, noise of the allocator included."""
    sizes = soaked[1]
    third = max(1, len(sizes) // 3)
    early, late = max(sizes[:third]), min(sizes[-third:])
    assert late < early * 1.05, f"{early:.0f} MiB grew to {late:.0f} MiB"
