"""Tree of thought: ideas branch, branches are judged, the best one branches again.

What is shared: the rules and the document by every branch; a thought by all that grow out of it.
"""

from __future__ import annotations

import sglang as sgl
from common import BRIEF, RULES, Saved, connect, say

QUESTION = "How can the library be loud for children and quiet for readers at the same time?"
BEGINNINGS = ("Use doors and distance, so that", "Use different hours, so that", "Use different floors, so that")
TURNS = ("The strongest objection is that", "To make it work, one must")


@sgl.function
def think(s, tokens: int):
    s += sgl.system(f"{RULES}\n\n{BRIEF}")
    s += sgl.user(QUESTION)
    s += sgl.assistant_begin()
    ideas = s.fork(len(BEGINNINGS))
    for branch, beginning in zip(ideas, BEGINNINGS, strict=True):
        branch += beginning + sgl.gen("idea", max_tokens=tokens, stop="\n")
        branch += "\nIs this in the brief? " + sgl.select("grade", choices=["yes", "partly", "no"])
    s["ideas"] = [(BEGINNINGS[i], ideas[i]["idea"], ideas[i]["grade"]) for i in range(len(BEGINNINGS))]
    best = min(range(len(BEGINNINGS)), key=lambda i: ("yes", "partly", "no").index(ideas[i]["grade"]))
    s["best"] = BEGINNINGS[best]

    # The next level grows out of the best branch: its thought is now part of the common prefix.
    leaves = ideas[best].fork(len(TURNS))
    for leaf, turn in zip(leaves, TURNS, strict=True):
        leaf += f"\n{turn}" + sgl.gen("thought", max_tokens=tokens, stop="\n")
    s["leaves"] = [turn + leaf["thought"] for leaf, turn in zip(leaves, TURNS, strict=True)]


def main() -> None:
    server, options = connect(__doc__)
    with Saved(server):
        state = think.run(tokens=options.tokens, backend=server.frontend(), temperature=0)
        print(f"{QUESTION}\n")
        for beginning, idea, grade in state["ideas"]:
            say(f"idea, in the brief: {grade}", beginning + idea)
        for leaf in state["leaves"]:
            say(f"out of {state['best']!r}", leaf)


if __name__ == "__main__":
    main()
