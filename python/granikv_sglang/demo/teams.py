"""Who asks what: two teams, each with one long prefix of its own and six roles with a question each."""

from __future__ import annotations

from dataclasses import dataclass

from granikv_sglang.demo import text_incident, text_library

END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Agent:
    """One request: the team's prefix, then the question of this role. ``place`` 0 leads the team and comes first."""

    team: str
    place: int
    role: str
    question: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Team:
    """A long prefix (system prompt and document) and the roles that ask about it."""

    name: str
    system: str
    document: str
    asks: tuple[tuple[str, str], ...]

    @property
    def prefix(self) -> str:
        """Everything that the requests of this team have in common, in the chat format of SmolLM2."""
        return f"<|im_start|>system\n{self.system}\n\n{self.document}{END_OF_TURN}\n<|im_start|>user\n"

    def agents(self, count: int) -> list[Agent]:
        """The first ``count`` agents of the team."""
        return [
            Agent(self.name, place, role, question, f"{self.prefix}{question}{END_OF_TURN}\n<|im_start|>assistant\n")
            for place, (role, question) in enumerate(self.asks[:count])
        ]


TEAMS = (
    Team(
        "Incident review",
        text_incident.SYSTEM,
        text_incident.DOCUMENT,
        (
            ("facilitator", "What is the purpose of a review, and how long may it last?"),
            ("timekeeper", "At what time was the incident detected, and by whom?"),
            ("database owner", "What did the loading tool do while it held its lock?"),
            ("network owner", "What did the network owner find at 07:14?"),
            ("customer voice", "What were the people offered who missed the ferry to the island festival?"),
            ("writer of actions", "Propose one good action that would keep a lock from blocking all sales."),
        ),
    ),
    Team(
        "Library redesign",
        text_library.SYSTEM,
        text_library.DOCUMENT,
        (
            ("project lead", "Why did the council decide against a new building on the meadow?"),
            ("architect", "What is on the second floor?"),
            ("youth officer", "What will young people find in the Loft?"),
            ("access adviser", "How will a blind visitor find the way from the bus stop to the desk?"),
            ("energy engineer", "How much heat does the building use today, and how much shall it use later?"),
            ("treasurer", "How much money may the building cost, and what is given up first if it runs short?"),
        ),
    ),
)

MOST_PER_TEAM = min(len(team.asks) for team in TEAMS)


def roster(per_team: int) -> list[Agent]:
    """``per_team`` agents of each team, the teams taking turns: the order in which they arrive."""
    lines = [team.agents(per_team) for team in TEAMS]
    return [agent for turn in zip(*lines, strict=True) for agent in turn]


def answer_text(raw: str) -> str:
    """What a reader should see of an answer: up to the end of the turn, white space made single."""
    return " ".join(raw.split(END_OF_TURN, 1)[0].split())
