"""Map-reduce: every section is read under one long instruction prompt, then the notes are put together.

What is shared: the instructions, by all sections. The sections themselves are private, each is read by one agent only.
"""

from __future__ import annotations

import sglang as sgl
from common import SECTIONS, Saved, connect, say

from granikv_sglang.demo import text_incident

HANDBOOK = text_incident.DOCUMENT.split("\n# Part 2")[0]
MAP = "Give the most important number or fact of this section in one sentence, in the style of the handbook."
REDUCE = "These are notes of one brief. Say in two sentences what the brief is about."


@sgl.function
def read_section(s, section: str, tokens: int):
    # The handbook first: it is the same for every section. The section, which differs, comes last.
    s += sgl.system(HANDBOOK)
    s += sgl.user(f"{MAP}\n\n{section}")
    s += sgl.assistant(sgl.gen("note", max_tokens=tokens))


@sgl.function
def put_together(s, notes: list[str], tokens: int):
    s += sgl.system(HANDBOOK)
    s += sgl.user(REDUCE + "\n" + "\n".join(f"- {note}" for note in notes))
    s += sgl.assistant(sgl.gen("summary", max_tokens=tokens))


def main() -> None:
    server, options = connect(__doc__)
    backend = server.frontend()
    with Saved(server):
        jobs = [{"section": section, "tokens": options.tokens} for section in SECTIONS[:6]]
        states = read_section.run_batch(jobs, backend=backend, temperature=0, num_threads=len(jobs))
        notes = [" ".join(state["note"].split()) for state in states]
        for section, note in zip(SECTIONS, notes, strict=False):
            say(section.splitlines()[0].removeprefix("## "), note)
        summary = put_together.run(notes=notes, tokens=2 * options.tokens, backend=backend, temperature=0)
        say("together", summary["summary"])


if __name__ == "__main__":
    main()
