"""A planner, parallel workers and a critic: three roles in one program.

What is shared: the rules and the document by all; the plan by all workers; plan and drafts by the critic's votes.
"""

from __future__ import annotations

import sglang as sgl
from common import BRIEF, RULES, Saved, connect, say

TASK = "Write a notice for the bus stop that tells people what the new library offers."
PARTS = ("for children", "for people who read", "for people who work")


@sgl.function
def notice(s, tokens: int):
    s += sgl.system(f"{RULES}\n\n{BRIEF}")
    s += sgl.user_begin() + f"Task: {TASK}\nThe planner names one room for each part:\n"
    for part in PARTS:
        s += f"- {part}: the " + sgl.gen(part, max_tokens=8, stop=["\n", ".", ","]) + "\n"

    workers = s.fork(len(PARTS))
    for branch, part in zip(workers, PARTS, strict=True):
        branch += f"Write one sentence {part}." + sgl.user_end()
        branch += sgl.assistant("Come to the library:" + sgl.gen("draft", max_tokens=tokens))
    s["drafts"] = [branch["draft"] for branch in workers]

    s += "The drafts:\n" + "\n".join(f"{i}. {draft}" for i, draft in enumerate(s["drafts"], 1))
    critics = s.fork(2)
    for branch, view in zip(critics, ("clearest", "most useful"), strict=True):
        branch += f"\nWhich draft is the {view}?" + sgl.user_end()
        branch += sgl.assistant("Draft " + sgl.select("vote", choices=[str(i + 1) for i in range(len(PARTS))]))
    s["votes"] = {view: branch["vote"] for branch, view in zip(critics, ("clearest", "most useful"), strict=True)}


def main() -> None:
    server, options = connect(__doc__)
    with Saved(server):
        state = notice.run(tokens=options.tokens, backend=server.frontend(), temperature=0)
        say("planner", "; ".join(f"{part}: the {state[part].strip()}" for part in PARTS))
        for part, draft in zip(PARTS, state["drafts"], strict=True):
            say(f"worker, {part}", draft)
        say("critic", "; ".join(f"{view}: draft {vote}" for view, vote in state["votes"].items()))


if __name__ == "__main__":
    main()
