"""How many of a request's cached tokens were HOT, carried from the scheduler into the ``usage`` a client reads.

The way of the number: the scheduler adds ``hot`` to SGLang's breakdown of cached tokens; in the HTTP process it rides
on the count itself (:class:`CachedTokens`), because SGLang's usage code hands on nothing else; there it becomes
``usage.prompt_tokens_details.hot_tokens``. SGLang's response classes would drop a field they do not know, so each is
replaced by a subclass that prints its usage as what it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import SerializeAsAny
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionResponse,
    CompletionStreamResponse,
    PromptTokensDetails,
    UsageInfo,
)

HOT = "hot"
"""Key of our number in SGLang's ``cached_tokens_details``."""


class CachedTokens(int):
    """A number of cached tokens that remembers how many of them lay in HOT extents."""

    hot: int

    def __new__(cls, cached: int, hot: int) -> CachedTokens:
        made = super().__new__(cls, cached)
        made.hot = min(hot, cached)
        return made


class HotTokensDetails(PromptTokensDetails):
    """SGLang's details of the prompt's tokens, and of its cached tokens those that lay in HOT extents."""

    hot_tokens: int = 0


class HotUsage(UsageInfo):
    """SGLang's usage with our details in it."""

    prompt_tokens_details: SerializeAsAny[PromptTokensDetails] | None = None


class HotChatResponse(ChatCompletionResponse):
    """Prints :class:`HotUsage` in full."""

    usage: SerializeAsAny[UsageInfo]


class HotChatStreamResponse(ChatCompletionStreamResponse):
    """Prints :class:`HotUsage` in full."""

    usage: SerializeAsAny[UsageInfo] | None = None


class HotCompletionResponse(CompletionResponse):
    """Prints :class:`HotUsage` in full."""

    usage: SerializeAsAny[UsageInfo] | None = None


class HotCompletionStreamResponse(CompletionStreamResponse):
    """Prints :class:`HotUsage` in full."""

    usage: SerializeAsAny[UsageInfo] | None = None


def mark_counts(batch: Any) -> None:
    """Make the cached-token counts of a scheduler's output batch carry their HOT part, where it has one."""
    if batch.cached_tokens_details:
        batch.cached_tokens = [
            CachedTokens(count, detail[HOT]) if detail and HOT in detail else count
            for count, detail in zip(batch.cached_tokens, batch.cached_tokens_details, strict=True)
        ]


def with_hot(usage: UsageInfo, counts: Iterable[int]) -> UsageInfo:
    """``usage`` with the HOT part of ``counts``, when it reports cached tokens at all and a count carries one."""
    ours = [count.hot for count in counts if isinstance(count, CachedTokens)]
    if usage.prompt_tokens_details is None or not ours:
        return usage
    details = HotTokensDetails(**usage.prompt_tokens_details.model_dump(), hot_tokens=sum(ours))
    return HotUsage(**{**usage.model_dump(), "prompt_tokens_details": details})


def first_choices(counts: Iterable[tuple[int, int]], n_choices: int) -> list[int]:
    """The counts of each prompt's first choice, as SGLang adds them up: ``n`` choices have one prompt."""
    return [count for index, count in counts if index % n_choices == 0]


Original = Callable[..., UsageInfo]


def response_usage(original: Original, responses: list[dict[str, Any]], n_choices: int = 1, *a: Any, **k: Any) -> Any:
    """Around ``UsageProcessor.calculate_response_usage``."""
    counts = enumerate(response["meta_info"].get("cached_tokens", 0) for response in responses)
    return with_hot(original(responses, n_choices, *a, **k), first_choices(counts, n_choices))


def streaming_usage(original: Original, *args: Any, **kwargs: Any) -> UsageInfo:
    """Around ``UsageProcessor.calculate_streaming_usage``."""
    usage = original(*args, **kwargs)
    named = inspect.signature(original).bind(*args, **kwargs).arguments
    return with_hot(usage, first_choices(named["cached_tokens"].items(), named["n_choices"]))
