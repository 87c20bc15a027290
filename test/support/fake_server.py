"""A stand-in for an SGLang server, for the benchmark's client side: its endpoints, tokens that follow the prompt.

As SGLang it aborts a request whose id an earlier stream had. It decodes nothing. Each next token is a hash of the
tokens before it, so equal prompts give equal answers on every instance, and a fault can be put in by name.
"""

from __future__ import annotations

import json
import re
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def next_token(tokens: list[int]) -> int:
    """The token that follows: any function of what came before does."""
    return 1000 + zlib.crc32(repr(tokens[-64:]).encode()) % 20000


@dataclass
class Faults:
    """What goes wrong. ``dies_after`` answers the server stops listening; ``wrong`` changes a request's tokens.
    ``old`` knows no ``/freeze_gc``.
    """

    dies_after: int | None = None
    short: bool = False
    wrong: Callable[[str], bool] = lambda _rid: False
    tie: bool = False
    retracts: bool = False
    refuses: bool = False
    no_cache: bool = False
    ends_stream: bool = False
    old: bool = False


@dataclass
class FakeServer:
    """Listens from ``start`` to ``stop``. ``granikv``: reports GraniKV's state. ``prompts``: all it was sent."""

    granikv: bool = False
    faults: Faults = field(default_factory=Faults)
    incremental: bool = False
    prompts: list[tuple[str, list[int]]] = field(default_factory=list)
    flushes: int = 0
    frozen: int = 0
    answered: int = 0

    def start(self) -> FakeServer:
        owner = self

        class Handler(_Handler):
            server_of = owner

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self._cached: set[tuple[int, ...]] = set()
        self._ids: set[str] = set()
        self._lock = threading.Lock()
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def flush(self) -> None:
        with self._lock:
            self.flushes += 1
            self._cached.clear()

    def name_of(self, rid: str) -> tuple[str, bool]:
        """The request's own name within its id, and whether the id was used before."""
        with self._lock:
            reused = bool(rid) and rid in self._ids
            self._ids.add(rid)
        return re.sub(r"-[0-9a-f]{32}$", "", rid), reused

    def take(self, body: dict[str, Any]) -> tuple[list[int], int]:
        """Remember a request; its prompt and how many of its tokens were cached."""
        prompt = body["input_ids"]
        with self._lock:
            self.prompts.append((body.get("rid", ""), prompt))
            cached = 0 if self.faults.no_cache else max((_common(prompt, seen) for seen in self._cached), default=0)
            self._cached.add(tuple(prompt))
        return prompt, min(cached, len(prompt) - 1)

    def output(self, rid: str, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(next_token(tokens))
        made = tokens[len(prompt) :]
        if self.faults.short:
            made = made[:-1]
        if self.faults.wrong(rid) and len(made) > 2:
            made[2] += 1
        return made

    def state(self) -> dict[str, Any]:
        inner: dict[str, Any] = {}
        if self.granikv:
            steps = {"uniform": {"not_decode": 1}, "cascade": {"memory_bound": self.answered}, "batched_gemm": {}}
            counters = {"promotions": self.answered, "promoted_tokens": 64 * self.answered, "bytes_not_reread": 10**9}
            declines = {"too_short": self.answered}
            inner["granikv"] = {"hot_tokens": 64, "counters": {**counters, "steps": steps, "declines": declines}}
        return {"version": "fake", "dtype": "float32", "device": "cpu", "internal_states": [inner]}


def _common(a: list[int], b: tuple[int, ...]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


class _Handler(BaseHTTPRequestHandler):
    server_of: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith("/server_info"):
            self._json(self.server_of.state())
        elif self.path.startswith("/v1/models"):
            self._json({"data": [{"id": "fake"}]})
        else:
            self._json({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if self.path.startswith("/flush_cache"):
            self.server_of.flush()
            self._json({})
        elif self.path == "/freeze_gc" and not self.server_of.faults.old:
            self.server_of.frozen += 1
            self._json({})
        elif self.path == "/generate":
            self._generate(body)
        else:
            self.send_error(404)

    def _generate(self, body: dict[str, Any]) -> None:
        server, faults = self.server_of, self.server_of.faults
        if faults.refuses:
            self._json({"error": {"message": "the pool is too small"}}, 400)
            return
        if faults.dies_after is not None and server.answered >= faults.dies_after:
            # As a killed process does: connections break, and nobody listens any more.
            self.close_connection = True
            self.connection.close()
            threading.Thread(target=server.stop).start()
            return
        body["rid"], reused = server.name_of(body.get("rid", ""))
        prompt, cached = server.take(body)
        output = server.output(body["rid"], prompt, body["sampling_params"]["max_new_tokens"])
        server.answered += 1
        if body.get("top_logprobs_num"):
            self._json(self._probe(prompt))
            return
        meta = {"prompt_tokens": len(prompt), "cached_tokens": cached, "num_retractions": int(faults.retracts)}
        if server.granikv:
            meta["cached_tokens_details"] = {"device": cached, "hot": cached // 2}
        if not body.get("stream"):
            done = {**meta, "completion_tokens": len(output), "finish_reason": {"type": "length"}}
            self._json({"output_ids": output, "meta_info": done})
            return
        if reused:
            output, meta["finish_reason"] = output[:1], {"type": "abort", "message": "Aborted"}
        self._stream(output, meta, body["sampling_params"].get("stream_interval", 1))

    def _stream(self, output: list[int], meta: dict[str, Any], step: int) -> None:
        server = self.server_of
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        begin = 0
        while begin < len(output):
            end = min(begin + step, len(output))
            last = end == len(output)
            if last and server.faults.ends_stream:
                break
            chunk = {
                "output_ids": output[begin:end] if server.incremental else output[:end],
                "meta_info": {"finish_reason": {"type": "length"} if last else None, **meta, "completion_tokens": end},
            }
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            begin = end
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _probe(self, prompt: list[int]) -> dict[str, Any]:
        """The top two after a prompt: the token that follows, and the one a ``wrong`` answer has there."""
        best = next_token(list(prompt))
        gap = 1e-5 if self.server_of.faults.tie else 1.0
        top = [[[-0.5, best, None], [-0.5 - gap, best + 1, None]]]
        return {"output_ids": [best], "meta_info": {"output_top_logprobs": top}}

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
