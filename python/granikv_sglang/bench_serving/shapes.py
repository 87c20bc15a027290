"""The shapes of multi-agent load: who shares which prefix with whom. Pure functions of a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from granikv_sglang.bench_serving.workload import Answers, Ask, Tokens, Vocabulary, Workload, generator, one_turn
from granikv_sglang.core import GraniKVError

POPULARITIES = ("uniform", "zipf")


@dataclass(frozen=True)
class MultiAgent:
    """One multi-agent load. Lengths in tokens.

    ``prefix`` is the shared prefix, of the longest group where lengths differ; ``private`` is each agent's own part.
    """

    shape: str = "homogeneous"
    agents: int = 16
    prefix: int = 2048
    private: int = 128
    output: int = 128
    groups: int | None = None
    length_ratio: float = 8.0
    popularity: str = "uniform"
    zipf_alpha: float = 1.0
    roles: int = 4
    role: int = 256
    fanout: tuple[int, ...] = (2, 4)
    rounds: int = 3
    vocab: int = 30000
    seed: int = 42

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise GraniKVError(f"--ma-shape {self.shape} is unknown; choose of {', '.join(SHAPES)}")
        if self.popularity not in POPULARITIES:
            raise GraniKVError(f"--ma-popularity {self.popularity} is unknown; choose of {', '.join(POPULARITIES)}")
        for flag, value, low in (
            ("--ma-agents", self.agents, 1),
            ("--ma-prefix-len", self.prefix, 1),
            ("--ma-private-len", self.private, 1),
            ("--ma-output-len", self.output, 1),
            ("--ma-roles", self.roles, 1),
            ("--ma-role-len", self.role, 1),
            ("--ma-rounds", self.rounds, 1),
            ("--ma-groups", 1 if self.groups is None else self.groups, 1),
            ("--ma-length-ratio", self.length_ratio, 1),
        ):
            if not value >= low:
                raise GraniKVError(f"{flag} must be at least {low}, got {value}")
        if not self.zipf_alpha > 0:
            raise GraniKVError(f"--ma-zipf-alpha must be above 0, got {self.zipf_alpha}")
        if not self.fanout or min(self.fanout) < 2:
            raise GraniKVError("--ma-fanout needs group sizes of at least 2; a group of one shares nothing")

    @property
    def label(self) -> str:
        """What this load is called in tables."""
        return f"{self.shape} {self.agents} x {self.prefix}"


@dataclass(frozen=True, slots=True)
class Group:
    """Agents on one path of shared stretches, ``(name, tokens)`` from the root; ``private`` tokens of each member."""

    name: str
    path: tuple[tuple[str, int], ...]
    members: int
    private: int


def build(spec: MultiAgent, repetition: int) -> Workload:
    """The workload of one repetition: shared stretches are those of every repetition, private parts are fresh."""
    if spec.shape == "rounds":
        return _rounds(spec, repetition)
    groups = SHAPES[spec.shape](spec)
    paths = _paths(spec, groups)
    privates = iter(
        Vocabulary(spec.vocab).privates([g.private for g in groups for _ in range(g.members)], *_own(spec, repetition))
    )
    asks = []
    for group, prefix in zip(groups, paths, strict=True):
        for member in range(group.members):
            prompt = (*prefix, *next(privates))
            asks.append(Ask(f"{group.name}-{member}", group.name, prompt, len(prompt), spec.output))
    # Agents of different groups arrive among each other, as they do in life.
    generator(*_own(spec, repetition), "order").shuffle(asks)
    return Workload(tuple(dict.fromkeys(p for p in paths if p)), one_turn(asks), _summary(groups))


def lengths_of(spec: MultiAgent, groups: int) -> list[int]:
    """Distinct prefix lengths in even steps, ``prefix / length_ratio`` to ``prefix``; all equal with a ratio of 1."""
    if groups == 1 or spec.length_ratio == 1:
        return [spec.prefix] * groups
    shortest = spec.prefix / spec.length_ratio
    lengths = [round(shortest + (spec.prefix - shortest) * i / (groups - 1)) for i in range(groups)]
    if lengths[0] < 1 or len(set(lengths)) < groups:
        raise GraniKVError(
            f"--ma-prefix-len {spec.prefix} with --ma-length-ratio {spec.length_ratio:g} gives no {groups} distinct "
            "lengths; raise one of the two, or lower --ma-groups"
        )
    return lengths


def members_of(spec: MultiAgent, groups: int) -> list[int]:
    """Agents of each group, at least one, ``agents`` in all; largest remainders get what rounding leaves.

    Under zipf the group at popularity rank r gets a share of ``r ** -alpha``; which group has which rank is seeded, so
    that popularity does not follow length.
    """
    if spec.agents < groups:
        raise GraniKVError(
            f"--ma-agents {spec.agents} is fewer than the {groups} groups; raise it or lower --ma-groups"
        )
    if spec.popularity == "uniform":
        weights = [1.0] * groups
    else:
        ranks = generator(spec.seed, "ranks").permutation(groups) + 1
        weights = [float(rank) ** -spec.zipf_alpha for rank in ranks]
    free, total = spec.agents - groups, sum(weights)
    exact = [free * weight / total for weight in weights]
    members = [1 + int(share) for share in exact]
    by_remainder = sorted(range(groups), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_remainder[: spec.agents - sum(members)]:
        members[i] += 1
    return members


def _homogeneous(spec: MultiAgent) -> list[Group]:
    return [Group("team", (("team", spec.prefix),), spec.agents, spec.private)]


def _heterogeneous(spec: MultiAgent) -> list[Group]:
    count = spec.groups or 8
    sizes = zip(lengths_of(spec, count), members_of(spec, count), strict=True)
    return [Group(f"team{i}", ((f"team{i}", n),), members, spec.private) for i, (n, members) in enumerate(sizes)]


def _forest(spec: MultiAgent) -> list[Group]:
    teams = spec.groups or 1
    members = members_of(replace(spec, popularity="uniform"), teams * spec.roles)
    return [
        Group(f"team{t}.role{r}", ((f"team{t}", spec.prefix), (f"team{t}.role{r}", spec.role)), count, spec.private)
        for (t, r), count in zip(((t, r) for t in range(teams) for r in range(spec.roles)), members, strict=True)
    ]


def _straggler(spec: MultiAgent) -> list[Group]:
    if spec.agents < 3:
        raise GraniKVError(f"--ma-shape straggler needs --ma-agents of at least 3, got {spec.agents}")
    inside = replace(spec, agents=spec.agents - 1)
    return [*_homogeneous(inside), Group("outsider", (), 1, spec.prefix + spec.private)]


def _fanout(spec: MultiAgent) -> list[Group]:
    groups: list[Group] = []
    left = spec.agents
    while left:
        wanted = spec.fanout[len(groups) % len(spec.fanout)]
        fitting = [size for size in (wanted, *sorted(spec.fanout, reverse=True)) if size <= left]
        if not fitting:
            raise GraniKVError(
                f"--ma-agents {spec.agents} is no sum of the group sizes of --ma-fanout; change one of the two"
            )
        name = f"fan{len(groups)}"
        groups.append(Group(name, ((name, spec.prefix),), fitting[0], spec.private))
        left -= fitting[0]
    return groups


def _none(spec: MultiAgent) -> list[Group]:
    return [Group("alone", (), spec.agents, spec.prefix + spec.private)]


SHAPES: dict[str, Callable[[MultiAgent], list[Group]]] = {
    "homogeneous": _homogeneous,
    "heterogeneous": _heterogeneous,
    "forest": _forest,
    "straggler": _straggler,
    "fanout": _fanout,
    "none": _none,
    "rounds": _homogeneous,
}


def _rounds(spec: MultiAgent, repetition: int) -> Workload:
    """Agents read each other's answers: what all said before follows the common prefix, in roster order."""
    group = _homogeneous(spec)[0]
    (prefix,) = _paths(spec, [group])

    def turn(number: int) -> Callable[[Answers], tuple[Ask, ...]]:
        own = Vocabulary(spec.vocab).privates([spec.private] * spec.agents, *_own(spec, repetition), number)

        def asks(answers: Answers) -> tuple[Ask, ...]:
            said = [token for t in range(number) for agent in range(spec.agents) for token in answers[_rid(t, agent)]]
            return tuple(
                Ask(_rid(number, agent), group.name, prompt, len(prompt), spec.output)
                for agent in range(spec.agents)
                for prompt in [(*prefix, *said, *own[agent])]
            )

        return asks

    return Workload((prefix,), tuple(turn(number) for number in range(spec.rounds)), _summary([group]))


def _rid(turn: int, agent: int) -> str:
    return f"turn{turn}-{agent}"


def _own(spec: MultiAgent, repetition: int) -> tuple[int | str, ...]:
    return (spec.seed, spec.shape, "private", repetition)


def _paths(spec: MultiAgent, groups: list[Group]) -> list[Tokens]:
    """Token ids of each group's shared path; a stretch that several groups name is the same ids in all."""
    number: dict[str, int] = {}
    vocabulary = Vocabulary(spec.vocab)
    paths: list[Tokens] = []
    for group in groups:
        path: Tokens = ()
        for name, length in group.path:
            index = number.setdefault(name, len(number))
            path += vocabulary.stretch(index, length, spec.seed, "shared", name)
        paths.append(path)
    return paths


def _summary(groups: list[Group]) -> tuple[dict[str, object], ...]:
    return tuple(
        {"group": g.name, "shared_tokens": sum(n for _, n in g.path), "members": g.members, "private_tokens": g.private}
        for g in groups
    )
