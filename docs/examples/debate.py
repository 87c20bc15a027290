"""A debate over a long document: agents open together, read each other's openings, and answer together.

What is shared: the rules and the document (all agents, both rounds), then also the openings (second round).
"""

from __future__ import annotations

import sglang as sgl
from common import BRIEF, RULES, Saved, connect, say

QUESTION = "Should the library spend its money on the quiet room or on the café?"
ROLES = ("a parent", "a newspaper reader", "the treasurer", "a student")


@sgl.function
def debate(s, tokens: int):
    # First what everybody needs and what never changes, so that all prompts begin alike.
    s += sgl.system(f"{RULES}\n\n{BRIEF}")
    s += sgl.user_begin() + f"A debate: {QUESTION}\n"
    openings = s.fork(len(ROLES))
    for branch, role in zip(openings, ROLES, strict=True):
        branch += f"Speak as {role}, in one sentence." + sgl.user_end()
        branch += sgl.assistant(f"As {role} I say that" + sgl.gen("opening", max_tokens=tokens, stop="\n"))
    s["openings"] = [branch["opening"] for branch in openings]

    # What was said is the same for all, so it comes before the role again.
    s += "The openings were:\n" + "\n".join(f"- {role}: {o}" for role, o in zip(ROLES, s["openings"], strict=True))
    replies = s.fork(len(ROLES))
    for branch, role, other in zip(replies, ROLES, ROLES[1:] + ROLES[:1], strict=True):
        branch += f"\nSpeak as {role} and answer {other} in one sentence." + sgl.user_end()
        branch += sgl.assistant(
            f"I cannot agree with {other}, because" + sgl.gen("reply", max_tokens=tokens, stop="\n")
        )
    s["replies"] = [branch["reply"] for branch in replies]

    s += "\nWhich side has the better reasons?" + sgl.user_end()
    s += sgl.assistant("The better reasons are for the " + sgl.select("verdict", choices=["quiet room", "café"]))


def main() -> None:
    server, options = connect(__doc__)
    with Saved(server):
        state = debate.run(tokens=options.tokens, backend=server.frontend(), temperature=0)
        print(f"{QUESTION}\n")
        for role, opening, reply in zip(ROLES, state["openings"], state["replies"], strict=True):
            say(f"{role} opens", f"I say that{opening}")
            say(f"{role} replies", f"I cannot agree, because{reply}")
        say("verdict", state["verdict"])


if __name__ == "__main__":
    main()
