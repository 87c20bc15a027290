"""The traffic: all agents at once through the official openai client, streaming, token ids with every piece of text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from granikv_sglang.core import GraniKVError
from granikv_sglang.demo.teams import Agent
from granikv_sglang.server.process import Server

MODEL = "SmolLM2-135M-Instruct"
STAGGER_SECONDS = 0.3
SNAPSHOT_AT_TOKEN = 4
"""The server's state is read once, when every agent has this many tokens: by then each prefix has found its place."""


@dataclass(slots=True)
class Answer:
    """What came back for one agent. ``stamps`` holds the arrival time of each token of ``token_ids``."""

    agent: Agent
    text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Round:
    """All answers of one side, in roster order, GraniKV's state while all agents decoded, and the time it took."""

    answers: list[Answer]
    snapshot: dict[str, Any]
    seconds: float


async def ask_all(
    server: Server,
    agents: Sequence[Agent],
    max_tokens: int,
    on_token: Callable[[int], None],
    on_answer: Callable[[Answer], None],
) -> Round:
    """Send every agent's request and collect the answers.

    The first agent of a team opens its document; each other one arrives some tenths of a second after the one before,
    counted from the first token of the team's first. Raises GraniKVError when a request fails.
    """
    begin = time.perf_counter()
    answers = [Answer(agent) for agent in agents]
    opened = {agent.team: asyncio.Event() for agent in agents}
    deep = asyncio.Event()
    async with _client(server) as client:

        async def one(answer: Answer) -> None:
            if answer.agent.place:
                await opened[answer.agent.team].wait()
                await asyncio.sleep(STAGGER_SECONDS * answer.agent.place)
            async for new in _stream(client, answer, max_tokens):
                opened[answer.agent.team].set()
                if all(len(other.token_ids) >= min(SNAPSHOT_AT_TOKEN, max_tokens) for other in answers):
                    deep.set()
                on_token(new)
            if len(answer.token_ids) != max_tokens:
                raise GraniKVError(
                    f"the {server.name} server sent {len(answer.token_ids)} tokens to {answer.agent.role}, "
                    f"{max_tokens} were asked for{server.last_words()}"
                )
            on_answer(answer)

        async def look() -> dict[str, Any]:
            await deep.wait()
            # On both sides, so that neither is slowed by a question the other is spared.
            return await asyncio.to_thread(server.granikv_state)

        tasks = [asyncio.create_task(one(answer)) for answer in answers]
        snapshot = asyncio.create_task(look())
        try:
            await asyncio.gather(*tasks)
            return Round(answers, await snapshot, time.perf_counter() - begin)
        except (openai.OpenAIError, OSError) as error:
            raise GraniKVError(f"the {server.name} server failed: {_line(error)}{server.last_words()}") from error
        finally:
            for task in (*tasks, snapshot):
                task.cancel()


async def warm_up(server: Server) -> None:
    """A short request that shares nothing with the teams; then the cache is emptied. Raises GraniKVError."""
    agent = Agent("warm-up", 0, "nobody", "", "Name three rivers and say where each of them meets the sea.")
    await ask_all(server, [agent], 8, lambda _: None, lambda _: None)
    try:
        await asyncio.to_thread(server.post, "/flush_cache?timeout=20", parse=False)
    except OSError as error:
        raise GraniKVError(f"the {server.name} server did not empty its cache: {error}{server.last_words()}") from error


def top_two(server: Server, token_ids: Sequence[int]) -> list[tuple[float, int]]:
    """The two most likely tokens after ``token_ids``, best first, as ``(log-probability, token id)``."""
    reply = server.post(
        "/generate",
        {
            "input_ids": list(token_ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 2,
        },
    )
    return [(float(logprob), int(token)) for logprob, token, *_ in reply["meta_info"]["output_top_logprobs"][0]]


def _client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=300.0,
        # No proxy from the environment between two processes of one machine.
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


async def _stream(client: openai.AsyncOpenAI, answer: Answer, max_tokens: int) -> Any:
    """Fill ``answer`` as it arrives; yields how many tokens each piece brought.

    ``completions``, not ``chat.completions``: of the two only it streams token ids, and those are what is compared.
    """
    stream = await client.completions.create(
        model=MODEL,
        prompt=answer.agent.prompt,
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        # Every request decodes to the last token, so that both sides and all requests do the same work; the end of the
        # turn stays visible in the text, and the transcript stops there.
        extra_body={"return_token_ids": True, "ignore_eos": True, "skip_special_tokens": False},
    )
    async for chunk in stream:
        now = time.perf_counter()
        for choice in chunk.choices:
            extra = choice.model_extra or {}
            new = extra.get("token_ids") or []
            answer.prompt_ids.extend(extra.get("prompt_token_ids") or [])
            answer.text += choice.text
            answer.token_ids.extend(new)
            answer.stamps.extend([now] * len(new))
            yield len(new)


def _line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
