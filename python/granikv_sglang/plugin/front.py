"""What GraniKV adds to the HTTP process: the live page, and HOT tokens in ``usage``. It has its own table of hooks.

The HTTP server runs in the process that was started first; schedulers and detokenizers are its children and need none
of this, nor the imports that come with it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sglang.srt.plugins.hook_registry import HookType

from granikv_sglang.plugin import checks, namespaces, usage
from granikv_sglang.plugin.hooks import Hook
from granikv_sglang.plugin.page import QuietState, SignIn, StateSource, build_router

GROUP = 16
"""Requests of a batch in one message: their prefill lasts about as long as the scheduler takes for the next one."""


@dataclass
class _Group:
    """Requests of one batch that are sent together, those that are packed so far."""

    size: int
    packed: list[Any] = field(default_factory=list)


class Front:
    """Handlers of the hooks in :data:`FRONT_TABLE`."""

    HotChatResponse = usage.HotChatResponse
    HotChatStreamResponse = usage.HotChatStreamResponse
    HotCompletionResponse = usage.HotCompletionResponse
    HotCompletionStreamResponse = usage.HotCompletionStreamResponse

    def __init__(self) -> None:
        self._secret = secrets.token_hex(8)
        self._groups: dict[str, _Group] = {}

    def before_http_server(self, server_args: Any, tokenizer_manager: Any, *_args: Any, **_kwargs: Any) -> None:
        """Hang the page into SGLang's FastAPI app, before its own middleware is added and it begins to listen."""
        # The hook that called us has imported the module: only now is it certain to be whole.
        from sglang.srt.entrypoints.http_server import app  # noqa: PLC0415

        if checks.selected(server_args):
            model = server_args.served_model_name or server_args.model_path
            logging.getLogger("uvicorn.access").addFilter(QuietState())
            app.include_router(build_router(StateSource(tokenizer_manager.get_internal_state, model)))

    def after_api_key(self, _result: Any, app: Any, **_keys: Any) -> None:
        """Around SGLang's own check of the key goes the form that asks a browser for it."""
        app.add_middleware(SignIn)

    def around_batched(self, original: Callable[..., bool], manager: Any, batch_size: int, requests: Any) -> bool:
        """Prompts given as token ids go to the scheduler :data:`GROUP` at a time.

        SGLang packs all of them before it sends any: 0.1 s for 128 prompts of 9K tokens in which the GPU has nothing to
        do. One by one, the first prefill is a single request, and the GPU waits while the scheduler prepares the next.
        """
        at_once = original(manager, batch_size, requests)
        if not at_once or manager.server_args.enable_tokenizer_batch_encode or batch_size <= GROUP:
            return at_once
        # What a batch that was refused or aborted while it was packed has left: SGLang has dropped its state.
        self._groups = {rid: group for rid, group in self._groups.items() if rid in manager.rid_to_state}
        for first in range(0, batch_size, GROUP):
            rids = requests.rid[first : first + GROUP]
            self._groups.update(dict.fromkeys(rids, _Group(len(rids))))
        return False

    def around_send(self, original: Callable[..., None], manager: Any, tokenized: Any) -> None:
        """The last of a group takes the others along."""
        group = self._groups.pop(tokenized.rid, None)
        if group is None:
            original(manager, tokenized)
            return
        group.packed.append(tokenized)
        if len(group.packed) == group.size:
            manager._send_batch_request(group.packed)

    def around_tokenized(
        self, original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Raises ValueError, which the server answers with status 400, for what would end the scheduler.

        That is a token the model does not have, or top log-probabilities fewer than none or more than there are tokens.
        """
        vocabulary = manager.model_config.vocab_size
        top = vars(request).get("top_logprobs_num") or 0  # an embedding request has none
        if not 0 <= top <= vocabulary:
            raise ValueError(f"{top} top log-probabilities were asked for; 0 to {vocabulary} are possible")
        try:
            made = original(manager, request, *args, **kwargs)
        except OverflowError as error:  # SGLang packs token ids into 64 bits
            raise ValueError(f"a token id is not one of the model's, which are 0 to {vocabulary - 1}") from error
        if made.input_ids and not request.contains_mm_input():
            # Packed by now, and so a hundred times quicker to look through than the list: 10 µs for 16K tokens.
            ids = np.frombuffer(made.input_ids, dtype=np.int64)
            for token in (int(ids.min()), int(ids.max())):
                if not 0 <= token < vocabulary:
                    raise ValueError(f"token id {token} is not one of the model's, which are 0 to {vocabulary - 1}")
        return made

    def around_extra_key(self, original: Callable[..., Any], serving: Any, request: Any) -> Any:
        joined = original(serving, request)  # refuses what is not a string
        return namespaces.salted(self._secret, request.cache_salt, request.extra_key) if request.cache_salt else joined

    def before_batch_output(self, _manager: Any, batch: Any) -> None:
        usage.mark_counts(batch)

    def around_response_usage(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return usage.response_usage(original, *args, **kwargs)

    def around_streaming_usage(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return usage.streaming_usage(original, *args, **kwargs)


_OPENAI = "sglang.srt.entrypoints.openai"
_RESPONSE_WHY = "SGLang's response classes drop a field of `usage` they do not know; the subclass prints it."
_RESPONSE_UNTIL = "SGLang's usage carries a free-form breakdown of cached tokens."

FRONT_TABLE: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        HookType.BEFORE,
        "before_http_server",
        (
            *("server_args", "tokenizer_manager", "template_manager", "port_args", "scheduler_infos"),
            *("subprocess_watchdog", "execute_warmup_func", "launch_callback"),
        ),
        "Adds the routes of the live page to SGLang's FastAPI app before it listens.",
        "SGLang lets a plug-in contribute a router.",
    ),
    Hook(
        "sglang.srt.utils.auth.add_api_key_middleware",
        HookType.AFTER,
        "after_api_key",
        ("app", "api_key", "admin_api_key"),
        "A browser at the live page cannot send the API key by itself: it gets a form that asks for it.",
        "SGLang lets a plug-in contribute a router with a sign-in page.",
    ),
    Hook(
        f"{_OPENAI}.serving_base.OpenAIServingBase._compute_extra_key",
        HookType.AROUND,
        "around_extra_key",
        ("self", "request"),
        "Marks where the cache salt ends and the extra key begins, so that no key can spell another's salt.",
        "SGLang keeps the parts of a cache namespace apart.",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._should_use_batch_tokenization",
        HookType.AROUND,
        "around_batched",
        ("self", "batch_size", "requests"),
        "Prompts given as token ids are sent 16 at a time: the first prefill runs while later ones are packed.",
        "SGLang sends the requests of such a batch as they are packed.",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request",
        HookType.AROUND,
        "around_send",
        ("self", "tokenized_obj"),
        "Holds such a prompt until its 16 are packed, then sends them by SGLang's `_send_batch_request`.",
        "SGLang sends the requests of such a batch as they are packed.",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        HookType.AROUND,
        "around_tokenized",
        ("self", "obj", "input_text", "input_ids", "input_embeds", "mm_inputs", "token_type_ids"),
        "Refuses token ids and numbers of top log-probabilities that the model does not have: they end the scheduler.",
        "SGLang checks both in every request.",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output",
        HookType.BEFORE,
        "before_batch_output",
        ("self", "recv_obj"),
        "Lets the count of cached tokens carry its HOT part to where `usage` is made.",
        "SGLang hands the breakdown of cached tokens to its usage code.",
    ),
    Hook(
        f"{_OPENAI}.usage_processor.UsageProcessor.calculate_response_usage",
        HookType.AROUND,
        "around_response_usage",
        ("responses", "n_choices", "enable_cache_report", "image_tokens", "audio_tokens", "video_tokens"),
        "Adds `hot_tokens` to the usage of an answer.",
        _RESPONSE_UNTIL,
    ),
    Hook(
        f"{_OPENAI}.usage_processor.UsageProcessor.calculate_streaming_usage",
        HookType.AROUND,
        "around_streaming_usage",
        (
            *("prompt_tokens", "reasoning_tokens", "completion_tokens", "cached_tokens", "n_choices"),
            *("enable_cache_report", "image_tokens", "audio_tokens", "video_tokens"),
        ),
        "Adds `hot_tokens` to the usage of a streamed answer.",
        _RESPONSE_UNTIL,
    ),
    *(
        Hook(f"{_OPENAI}.protocol.{target}", HookType.REPLACE, handler, ("usage",), _RESPONSE_WHY, _RESPONSE_UNTIL)
        for target, handler in (
            ("ChatCompletionResponse", "HotChatResponse"),
            ("ChatCompletionStreamResponse", "HotChatStreamResponse"),
            ("CompletionResponse", "HotCompletionResponse"),
            ("CompletionStreamResponse", "HotCompletionStreamResponse"),
        )
    ),
)
"""Hooks of the HTTP process. A ``REPLACE`` row names a subclass; its ``parameters`` are the fields it overrides."""
