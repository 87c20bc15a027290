"""One request with exact token ids, for SGLang's load generator, which has none that sees ids or needs no tokenizer.

SGLang's own request function reads text: a server without a tokenizer sends none, and two texts may be equal where ids
are not. This one has the same signature, goes into the same table, and records ids and their arrival.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from sglang.benchmark import serving

READ_BUFFER = 16 << 20
"""Bytes. A chunk holds all ids so far, one line each: long answers need more than aiohttp's default."""


@dataclass
class IdOutput(serving.RequestFuncOutput):
    """SGLang's record of a request, with token ids. ``stamps`` holds each token's arrival, in seconds of one clock;
    ``hot`` is the cached prompt tokens that GraniKV found in HOT."""

    rid: str = ""
    token_ids: list[int] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    hot: int = 0
    retractions: int = 0
    finish: str = ""


class IdTokenizer:
    """Stands in for a tokenizer where SGLang counts output tokens: our text is ids with blanks between."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[str]:
        return text.split()


@dataclass
class IdRequests:
    """Request function of one run of one side. ``outputs`` fills as requests end, failed ones included.

    Args:
        options: the parsed command line, for the sampling flags of SGLang's benchmark.
        stream_interval: tokens between two chunks of a stream.
        timed: whether a request waits for its trace timestamp (milliseconds, times ``slowdown``).
        on_tokens: called with the number of new tokens.
    """

    options: Any
    stream_interval: int
    timed: bool = False
    slowdown: float = 1.0
    on_tokens: Callable[[int], None] = lambda _new: None
    outputs: list[IdOutput] = field(default_factory=list)
    started: float | None = None

    async def __call__(self, request_func_input: serving.RequestFuncInput, pbar: Any = None) -> IdOutput:
        if self.started is None:
            self.started = time.perf_counter()
        output = IdOutput(prompt_len=request_func_input.prompt_len)
        body = self._body(request_func_input)
        output.rid = str(body.get("rid", ""))
        if output.rid:
            # Never the same id twice: SGLang aborts the id of a stream once more, two seconds after its end.
            body["rid"] = f"{output.rid}-{uuid.uuid4().hex}"
        if self.timed and request_func_input.timestamp is not None:
            wait = self.started + request_func_input.timestamp * self.slowdown / 1e3 - time.perf_counter()
            await asyncio.sleep(max(0.0, wait))
        data = orjson.dumps(body)
        output.start_time = time.perf_counter()
        try:
            await self._send(request_func_input.api_url, data, output)
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            output.success, output.error = False, f"{type(error).__name__}: {error}"
        output.generated_text = " ".join(map(str, output.token_ids))
        self.outputs.append(output)
        return output

    def _body(self, asked: serving.RequestFuncInput) -> dict[str, Any]:
        options = self.options
        sampling: dict[str, Any] = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "max_new_tokens": asked.output_len,
            "ignore_eos": not options.disable_ignore_eos,
        }
        if self.stream_interval > 1:
            sampling["stream_interval"] = self.stream_interval
        body: dict[str, Any] = {
            "text" if isinstance(asked.prompt, str) else "input_ids": asked.prompt,
            "sampling_params": sampling,
            "stream": not options.disable_stream,
        }
        if asked.lora_name:
            body["lora_path"] = asked.lora_name
        if options.return_logprob:
            body["return_logprob"], body["logprob_start_len"] = True, options.logprob_start_len
            body["top_logprobs_num"], body["token_ids_logprob"] = options.top_logprobs_num, options.token_ids_logprob
        extra = dict(asked.extra_request_body)
        sampling.update(extra.pop("sampling_params", {}))
        return body | extra

    async def _send(self, url: str, data: bytes, output: IdOutput) -> None:
        headers = {"Content-Type": "application/json", **serving.get_request_headers()}
        timeout = aiohttp.ClientTimeout(total=6 * 3600)
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=READ_BUFFER) as session,
            session.post(url, data=data, headers=headers) as reply,
        ):
            if reply.status != 200:
                output.error = f"HTTP {reply.status}: {(await reply.text())[:300]}"
                return
            async for line in reply.content:
                chunk = line.strip().removeprefix(b"data:").strip()
                if chunk and chunk != b"[DONE]" and not self._take(orjson.loads(chunk), output):
                    return
        if output.token_ids and output.finish:
            output.success = True
        elif not output.error:
            output.error = "the stream ended before the answer did"

    def _take(self, chunk: Any, output: IdOutput) -> bool:
        """Add one chunk to ``output``; False when it is an error and the stream is over."""
        now = time.perf_counter()
        # Without streaming the answer may be a list of one.
        chunk = chunk[0] if isinstance(chunk, list) else chunk
        if "error" in chunk:
            output.error = str(chunk["error"])[:300]
            return False
        meta = chunk["meta_info"]
        ids, made = chunk["output_ids"], meta["completion_tokens"]
        # Servers stream either all ids so far or the new ones (--incremental-streaming-output).
        fresh = ids[len(output.token_ids) :] if len(ids) == made else ids
        if fresh:
            self._time(len(fresh), now, output)
            output.token_ids.extend(fresh)
            output.stamps.extend([now] * len(fresh))
            output.output_len = len(output.token_ids)
            output.latency = now - output.start_time
            self.on_tokens(len(fresh))
        output.cached_tokens = meta.get("cached_tokens") or 0
        output.hot = (meta.get("cached_tokens_details") or {}).get("hot", 0)
        output.retractions = meta.get("num_retractions") or 0
        reason = meta.get("finish_reason")
        if reason:
            output.finish = reason["type"]
            if output.finish == "abort":
                output.error = f"aborted by the server: {reason.get('message', 'no reason given')}"[:300]
                return False
        return True

    @staticmethod
    def _time(fresh: int, now: float, output: IdOutput) -> None:
        """Latencies as SGLang counts them: tokens that come together share the gap before them."""
        if not output.stamps:
            output.ttft = now - output.start_time
        else:
            output.itl.extend([(now - output.stamps[-1]) / fresh] * fresh)
