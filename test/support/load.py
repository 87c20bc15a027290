"""Seeded multi-agent load on SGLang's native endpoint, and the comparison of two servers' greedy tokens."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from granikv_sglang.server.process import Server

TIE = 1e-3
"""Log-probabilities closer than this are a tie: float32 sums in another order differ by up to about 1e-5 here."""


@dataclass(frozen=True)
class Request:
    rid: str
    group: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    extra_key: str | None = None


@dataclass(frozen=True)
class Reply:
    token_ids: tuple[int, ...]
    top: tuple[tuple[tuple[float, int], ...], ...]
    cached: int


def post(server: Server, request: Request, timeout: float = 300.0) -> Any:
    """One greedy request; top-2 log-probabilities of every output token come with it."""
    body: dict[str, Any] = {
        "rid": request.rid,
        "input_ids": list(request.input_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": request.max_new_tokens, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": -1,
    }
    if request.extra_key is not None:
        body["extra_key"] = request.extra_key
    return server.post("/generate", body, timeout=timeout)


def generate(server: Server, request: Request) -> Reply:
    """The reply to a request that nobody aborts."""
    answer = post(server, request)
    top = answer["meta_info"]["output_top_logprobs"]
    return Reply(
        tuple(answer["output_ids"]),
        tuple(tuple((logprob, token) for logprob, token, _ in pair) for pair in top),
        answer["meta_info"]["cached_tokens"],
    )


def run(
    server: Server, requests: Sequence[Request], gap: float = 0.0, aborts: Sequence[Request] = ()
) -> dict[str, Reply]:
    """Send ``requests`` in order, ``gap`` seconds apart on average; ``aborts`` start among them and are cut short."""
    rng = random.Random(7)
    replies: dict[str, Reply] = {}
    lock = threading.Lock()

    def one(request: Request) -> None:
        reply = generate(server, request)
        with lock:
            replies[request.rid] = reply

    def cut(request: Request) -> None:
        thread = threading.Thread(target=post, args=(server, request), daemon=True)
        thread.start()
        time.sleep(rng.uniform(0.2, 2.5))
        server.post("/abort_request", {"rid": request.rid}, parse=False)
        thread.join(120)
        assert not thread.is_alive(), f"aborted request {request.rid} never came back"

    plan: list[tuple[Any, Request]] = [(one, request) for request in requests]
    for request in aborts:
        plan.insert(rng.randrange(len(plan)), (cut, request))
    with ThreadPoolExecutor(len(plan)) as pool:
        futures = []
        for work, request in plan:
            futures.append(pool.submit(work, request))
            time.sleep(rng.uniform(0, 2 * gap))
        for future in futures:
            future.result()
    return replies


@dataclass(frozen=True)
class Comparison:
    """``ties`` requests diverge where two logits are closer than :data:`TIE`; ``wrong`` diverge for no such reason."""

    equal: int
    ties: tuple[str, ...]
    wrong: tuple[str, ...]


def compare(ours: dict[str, Reply], stock: dict[str, Reply]) -> Comparison:
    """Greedy tokens of two servers, request by request."""
    assert ours.keys() == stock.keys()
    equal, ties, wrong = 0, [], []
    for rid, reply in ours.items():
        reference = stock[rid]
        assert len(reply.token_ids) == len(reference.token_ids), rid
        differ = [i for i, (a, b) in enumerate(zip(reply.token_ids, reference.token_ids, strict=True)) if a != b]
        if not differ:
            equal += 1
            continue
        at = differ[0]
        (first, _), (second, other) = reference.top[at][:2]
        tie = first - second < TIE and reply.token_ids[at] == other
        (ties if tie else wrong).append(rid)
    return Comparison(equal, tuple(ties), tuple(wrong))
