"""HOT tokens in ``usage``: counted in the scheduler, carried through SGLang's own code, printed by its own classes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.entrypoints.openai.usage_processor import UsageProcessor

from granikv_sglang.config import GraniKVConfig
from granikv_sglang.core import Span
from granikv_sglang.plugin import usage
from granikv_sglang.plugin.runtime import Runtime

DETAILS = {"device": 90, "host": 0, "hot": 64}


def batch(*pairs):
    return SimpleNamespace(cached_tokens=[n for n, _ in pairs], cached_tokens_details=[d for _, d in pairs])


def marked(*pairs) -> list[int]:
    made = batch(*pairs)
    usage.mark_counts(made)
    return made.cached_tokens


def response(count: int) -> dict:
    return {"meta_info": {"prompt_tokens": 100, "completion_tokens": 3, "cached_tokens": count}}


def test_a_count_carries_its_hot_part_and_stays_a_number():
    plain, none, hot = marked((5, {"device": 5, "host": 0}), (0, None), (90, DETAILS))
    assert (plain, none, hot) == (5, 0, 90)
    assert isinstance(hot, usage.CachedTokens) and hot.hot == 64
    assert not isinstance(plain, usage.CachedTokens)
    assert json.dumps({"cached_tokens": hot}) == '{"cached_tokens": 90}'
    assert usage.CachedTokens(10, 64).hot == 10


def test_a_batch_without_details_is_left_alone():
    made = SimpleNamespace(cached_tokens=[1, 2], cached_tokens_details=None)
    usage.mark_counts(made)
    assert made.cached_tokens == [1, 2]


@pytest.mark.parametrize("n", [1, 2])
def test_usage_of_an_answer(n):
    (count,) = marked((90, DETAILS))
    responses = [response(count) for _ in range(n)]
    found = usage.response_usage(UsageProcessor.calculate_response_usage, responses, n, enable_cache_report=True)
    assert found.prompt_tokens_details.model_dump() == {"cached_tokens": 90, "hot_tokens": 64}
    assert (found.prompt_tokens, found.completion_tokens) == (100, 3 * n)


def test_usage_of_a_stream():
    counts = dict(enumerate(marked((90, DETAILS), (90, DETAILS), (40, {"device": 40, "host": 0, "hot": 0}))))
    found = usage.streaming_usage(
        UsageProcessor.calculate_streaming_usage,
        *({0: 100}, {0: 0}, {0: 3}),
        cached_tokens=counts,
        n_choices=2,
        enable_cache_report=True,
    )
    assert found.prompt_tokens_details.model_dump() == {"cached_tokens": 130, "hot_tokens": 64}


def test_without_a_cache_report_or_without_granikv_usage_is_stocks():
    (count,) = marked((90, DETAILS))
    original = UsageProcessor.calculate_response_usage
    assert usage.response_usage(original, [response(count)]).prompt_tokens_details is None
    stock = usage.response_usage(original, [response(90)], enable_cache_report=True)
    assert type(stock) is protocol.UsageInfo
    assert stock.prompt_tokens_details.model_dump() == {"cached_tokens": 90}


CLASSES = [
    (usage.HotChatResponse, {"id": "1", "model": "m", "choices": []}),
    (usage.HotChatStreamResponse, {"id": "1", "model": "m", "choices": []}),
    (usage.HotCompletionResponse, {"id": "1", "model": "m", "choices": []}),
    (usage.HotCompletionStreamResponse, {"id": "1", "model": "m", "choices": []}),
]


@pytest.mark.parametrize(("cls", "fields"), CLASSES, ids=lambda value: getattr(value, "__name__", ""))
def test_response_classes_print_it_and_print_stocks_usage_as_stock_does(cls, fields):
    (count,) = marked((90, DETAILS))
    found = usage.response_usage(UsageProcessor.calculate_response_usage, [response(count)], enable_cache_report=True)
    printed = json.loads(cls(**fields, created=1, usage=found).model_dump_json())
    assert printed["usage"]["prompt_tokens_details"] == {"cached_tokens": 90, "hot_tokens": 64}
    plain = UsageProcessor.calculate_response_usage([response(90)], enable_cache_report=True)
    parent = cls.__mro__[1]
    stock = parent(**fields, created=1, usage=plain)
    assert cls(**fields, created=1, usage=plain).model_dump_json() == stock.model_dump_json()


def test_the_scheduler_counts_hot_within_cached():
    runtime = Runtime(GraniKVConfig())
    req = SimpleNamespace(last_node=object(), cached_tokens=90, finished=lambda: True)
    assert runtime.after_cached_tokens({"device": 90, "host": 0}, None, req) == {"device": 90, "host": 0}
    runtime.tree = SimpleNamespace(hot_path=lambda _node: ((1, Span(256, 64)), (2, Span(320, 100))))
    assert runtime.after_cached_tokens({"device": 90, "host": 0}, None, req)["hot"] == 90
    runtime.tree = SimpleNamespace(hot_path=lambda _node: ((1, Span(256, 64)),))
    assert runtime.after_cached_tokens({"device": 90, "host": 0}, None, req)["hot"] == 64
    assert runtime.after_cached_tokens(None, None, req) is None
    req.finished = lambda: False
    assert runtime.after_cached_tokens({"device": 90, "host": 0}, None, req) == {"device": 90, "host": 0}
