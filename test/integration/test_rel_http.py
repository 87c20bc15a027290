"""The server's doors under nonsense: our endpoints fuzzed from the description, SGLang's with malformed requests.

None of it may end the scheduler, whose pool is checked by SGLang and by our audit in every turn.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from granikv_sglang.server.process import Server

OURS = r"^/granikv|^/server_info$|^/get_server_info$|^/flush_cache$"
"""What this project adds, what shows its state, and the endpoint that empties HOT."""


def test_fuzzing_our_endpoints_never_gives_a_server_error(granikv):
    """Schemathesis's own pytest plug-in does not work with this pytest; its strategies do."""
    description = schemathesis.openapi.from_url(f"{granikv.url}/openapi.json").include(path_regex=OURS)
    fuzzed = []
    for result in description.get_all_operations():
        operation = result.ok()

        @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def fuzz(case):
            case.call_and_validate(checks=[not_a_server_error], timeout=60)

        fuzz()
        fuzzed.append(operation.path)
    assert {"/granikv", "/granikv/state", "/get_server_info"} <= set(fuzzed)


def send(server: Server, path: str, body: bytes, kind: str = "application/json") -> tuple[int, str]:
    request = urllib.request.Request(server.url + path, data=body, headers={"Content-Type": kind})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=90) as reply:
            return reply.status, reply.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


CHAT = {"model": "default", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
TEXT = {"model": "default", "prompt": "One, two,", "max_tokens": 2}

MALFORMED: list[tuple[str, Any]] = [
    ("/v1/chat/completions", b""),
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b"[]"),
    ("/v1/chat/completions", b"null"),
    ("/v1/chat/completions", b'{"a": ' * 500),
    ("/v1/chat/completions", b"\xff\xfe\x00"),
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {**CHAT, "messages": []}),
    ("/v1/chat/completions", {**CHAT, "messages": "hello"}),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "nobody", "content": "x"}]}),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user"}]}),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "\ud800"}]}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": -5}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 10**12}),
    ("/v1/chat/completions", {**CHAT, "temperature": "warm"}),
    ("/v1/chat/completions", {**CHAT, "temperature": -1}),
    ("/v1/chat/completions", {**CHAT, "top_p": 7}),
    ("/v1/chat/completions", {**CHAT, "n": 0}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 10**6}),
    ("/v1/chat/completions", {**CHAT, "stop": [1, 2]}),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {"abc": 1}}),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {"99999999": 5}}),
    ("/v1/chat/completions", {**CHAT, "cache_salt": ["a", "b"]}),
    ("/v1/chat/completions", {**CHAT, "extra_key": {"a": 1}}),
    ("/v1/chat/completions", {**CHAT, "tools": "hammer"}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": 7}}),
    ("/v1/completions", {**TEXT, "prompt": []}),
    ("/v1/completions", {**TEXT, "prompt": ""}),
    ("/v1/completions", {**TEXT, "prompt": [-1]}),
    ("/v1/completions", {**TEXT, "prompt": [1, 2, 10**7]}),
    ("/v1/completions", {**TEXT, "prompt": [2**70]}),
    ("/v1/completions", {**TEXT, "prompt": [[1, 2], ["a"]]}),
    ("/v1/completions", {**TEXT, "prompt": [1] * 20000}),
    ("/v1/completions", {**TEXT, "echo": True, "logprobs": -3}),
    ("/v1/completions", {**TEXT, "min_tokens": 10}),
    ("/generate", {"input_ids": [5, -7], "sampling_params": {"max_new_tokens": 2}}),
    ("/generate", {"input_ids": [[5], [10**9]], "sampling_params": {"max_new_tokens": 2}}),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2, "no_such": 1}}),
    ("/generate", {"text": "x", "extra_key": 5}),
    ("/generate", {"text": ["x", "y"], "extra_key": ["only one"]}),
    ("/abort_request", {"rid": 7}),
    ("/abort_request", b"x"),
]


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_a_malformed_request_is_answered_and_the_scheduler_lives(granikv, number):
    path, body = MALFORMED[number]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, text = send(granikv, path, raw)
    assert status < 600, text
    alive, answer = send(granikv, "/v1/completions", json.dumps(TEXT).encode())
    assert alive == 200, f"the server does not answer any more after {raw[:120]!r} (status {status})"
    assert json.loads(answer)["choices"][0]["text"]


@pytest.mark.parametrize("prompt", [[-1], [1, 2, 10**7]])
def test_token_ids_outside_the_vocabulary_are_refused_by_name(granikv, prompt):
    """In stock SGLang 0.5.17 one such request ends the scheduler."""
    status, text = send(granikv, "/v1/completions", json.dumps({**TEXT, "prompt": prompt}).encode())
    assert status == 400
    assert f"token id {min(prompt) if min(prompt) < 0 else max(prompt)} is not one of the model's" in text


@pytest.mark.parametrize("top", [10**6, -3])
def test_impossible_numbers_of_top_logprobs_are_refused(granikv, top):
    """In stock SGLang 0.5.17 one such request ends the scheduler, too."""
    body = {"text": "x", "return_logprob": True, "top_logprobs_num": top, "sampling_params": {"max_new_tokens": 2}}
    status, text = send(granikv, "/generate", json.dumps(body).encode())
    assert status == 400
    assert f"{top} top log-probabilities were asked for" in text


def test_a_crafted_extra_key_does_not_reach_another_tenants_salt(granikv):
    """Over HTTP: tenant ``acme`` by salt; then whoever may choose extra keys tries to be it."""
    client = openai.OpenAI(base_url=f"{granikv.url}/v1", api_key="none")
    text = "The harbour master wrote down every ship, its cargo and its captain, from the first of March. " * 4

    def cached(**key: str) -> int:
        reply = client.completions.create(model="default", prompt=text, max_tokens=1, temperature=0, extra_body=key)
        details = reply.usage.prompt_tokens_details if reply.usage else None
        return details.cached_tokens or 0 if details else 0

    assert cached(cache_salt="acme") == 0
    assert cached(cache_salt="acme") > 0
    assert cached(cache_salt="ac", extra_key="me") == 0
    assert cached(extra_key="acme") == 0
    assert cached(extra_key="4:acme") == 0
    assert cached(cache_salt="acme", extra_key="x") == 0
    assert cached(cache_salt="acme", extra_key="x") > 0
