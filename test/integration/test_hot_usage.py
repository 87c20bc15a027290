"""HOT tokens in the usage a client reads, from a real server, in every form that an answer has."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from granikv_sglang.demo.text_library import DOCUMENT

SYSTEM = {"role": "system", "content": "\n## ".join(DOCUMENT.split("\n## ")[:5])}
ASK = {"model": "default", "temperature": 0, "max_tokens": 4}


def chat(question: str) -> dict:
    return {**ASK, "messages": [SYSTEM, {"role": "user", "content": question}]}


@pytest.fixture(scope="module")
def client(everyday) -> openai.OpenAI:
    """A client of a server on which the document is HOT, because several agents asked about it at the same time."""
    everyday.post("/flush_cache?timeout=30", parse=False)
    made = openai.OpenAI(base_url=f"{everyday.url}/v1", api_key="none", timeout=300)
    cold = made.chat.completions.create(**chat("What is the Loft?")).usage
    assert cold is not None and cold.prompt_tokens_details is None
    with ThreadPoolExecutor(4) as pool:
        asked = [f"What is in room {i}?" for i in range(4)]
        list(pool.map(lambda text: made.chat.completions.create(**{**chat(text), "max_tokens": 40}), asked))
    assert everyday.granikv_state()["hot_tokens"] >= 512
    return made


def counted(usage) -> tuple[int, int]:
    details = usage.prompt_tokens_details
    assert 512 <= details.hot_tokens <= details.cached_tokens < usage.prompt_tokens
    return details.cached_tokens, details.hot_tokens


def test_chat(client, everyday):
    hot = everyday.granikv_state()["hot_tokens"]
    _, found = counted(client.chat.completions.create(**chat("And upstairs?")).usage)
    assert found <= hot


def test_several_choices_count_their_one_prompt_once(client):
    one = counted(client.chat.completions.create(**chat("Once?")).usage)
    two = counted(client.chat.completions.create(**chat("Two?"), n=2).usage)
    assert one[1] == two[1]


def test_streamed_chat(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**chat("Streamed?"), stream=True, stream_options=options))
    told = [chunk.usage for chunk in chunks if chunk.usage is not None]  # the piece that only names the role has none
    counted(told[-1])


@pytest.mark.parametrize("stream", [False, True])
def test_completions(client, everyday, stream):
    prompt = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\nPlain {stream}?"
    if stream:
        pieces = client.completions.create(**ASK, prompt=prompt, stream=True, stream_options={"include_usage": True})
        usage = list(pieces)[-1].usage
    else:
        usage = client.completions.create(**ASK, prompt=prompt).usage
    counted(usage)


def test_sglangs_own_endpoint(everyday, client):
    prompt = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\nOwn?"
    reply = everyday.post("/generate", {"text": prompt, "sampling_params": {"max_new_tokens": 2}})["meta_info"]
    details = reply["cached_tokens_details"]
    assert details["device"] == reply["cached_tokens"]
    assert 512 <= details["hot"] <= details["device"]
