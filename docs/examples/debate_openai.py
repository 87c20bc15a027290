"""The debate with the official `openai` client: no SGLang on the client's side, tool schemas as the shared prefix.

What is shared: the tool schemas and the document by all agents and rounds, then also what was said in round one. The
tools stand in the system message, in one fixed order, because not every model's chat template prints `tools`.
"""

from __future__ import annotations

import asyncio
import json

import openai
from common import BRIEF, RULES, Saved, connect, say

QUESTION = "Should the café be open in the evening?"
ROLES = ("a parent", "a neighbour", "the treasurer", "a student")


def tool(name: str, purpose: str, **parameters: str) -> dict:
    """A function in the form that the `tools` parameter has."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": purpose, "parameters": schema}}


TOOLS = (
    tool("look_up_room", "Find a room of the building.", room="its name", floor="the floor it is on"),
    tool("look_up_sum", "Find an amount of money in the brief.", use="what the money is for"),
    tool("ask_the_council", "Put a question to the council.", question="the question", urgency="high or low"),
    tool("book_a_room", "Book a room.", room="its name", day="the day, as 2026-05-31", hours="from and to"),
)
# sort_keys: the same text every time, whatever order a dict was built in. That is what makes it a shared prefix.
SYSTEM = f"{RULES}\n\nYou may name one of these tools:\n{json.dumps(TOOLS, sort_keys=True)}\n\n{BRIEF}"


async def speak(client: openai.AsyncOpenAI, said: str, ask: str, tokens: int) -> tuple[str, str]:
    """One agent's turn: its text and where its prompt came from. ``said`` is common to all, ``ask`` comes last."""
    reply = await client.chat.completions.create(
        model="default",
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{said}\n{ask}"}],
        max_tokens=tokens,
        temperature=0,
    )
    details = reply.usage.prompt_tokens_details
    came_from = f"{reply.usage.prompt_tokens} prompt tokens"
    if details is not None:  # the server was started with --enable-cache-report
        came_from += f", {details.cached_tokens} cached, {details.hot_tokens} of them HOT"
    return reply.choices[0].message.content or "", came_from


async def debate(client: openai.AsyncOpenAI, tokens: int) -> None:
    said = f"A debate: {QUESTION}"
    for number, wish in enumerate(("Speak as {}, in one sentence.", "Speak as {} and answer one of the others."), 1):
        turns = await asyncio.gather(*(speak(client, said, wish.format(role), tokens) for role in ROLES))
        for role, (text, came_from) in zip(ROLES, turns, strict=True):
            say(f"round {number}, {role} ({came_from})", text)
        said += "".join(f"\n- {role}: {' '.join(text.split())}" for role, (text, _) in zip(ROLES, turns, strict=True))


def main() -> None:
    server, options = connect(__doc__)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.api_key or "none", timeout=300)
    with Saved(server):
        print(f"{QUESTION}\n")
        asyncio.run(debate(client, options.tokens))


if __name__ == "__main__":
    main()
