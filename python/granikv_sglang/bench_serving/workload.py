"""What is asked of a server, as plain values: exact token ids, the shared stretches behind them, turns of a dialogue.

Nothing here knows HTTP, SGLang or a clock. Ids are drawn from seeds alone, so that the same command gives the same
prompts on every machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from granikv_sglang.core import GraniKVError

FIRST_ID = 100
"""Ids below are special tokens in many vocabularies."""
STRETCH_HEADS = 2000
"""Ids ``FIRST_ID`` to ``FIRST_ID + STRETCH_HEADS - 1`` begin shared stretches and nothing else begins with them."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``prompt`` is token ids, or text where a dataset of SGLang gives text.

    ``group`` names whom it shares with; ``at_ms`` is its arrival in a trace, in milliseconds from the start.
    """

    rid: str
    group: str
    prompt: Tokens | str
    prompt_len: int
    output_len: int
    at_ms: float | None = None


Answers = Mapping[str, Sequence[int]]
"""Output token ids by request id."""


@dataclass(frozen=True)
class Workload:
    """The requests of one run of one side.

    Attributes:
        prefixes: token ids that are shared and the same in every repetition: what a warm cache holds.
        turns: each gives the requests of one turn from all answers so far. One turn, unless agents talk.
        groups: JSON-ready summary, a row for each group: name, shared tokens, members.
    """

    prefixes: tuple[Tokens, ...]
    turns: tuple[Callable[[Answers], tuple[Ask, ...]], ...]
    groups: tuple[dict[str, object], ...]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids from ``FIRST_ID`` to ``stop - 1``. Raises GraniKVError when too small to keep parts apart."""

    stop: int

    def __post_init__(self) -> None:
        if self.stop < FIRST_ID + 2 * STRETCH_HEADS:
            raise GraniKVError(
                f"--ma-vocab must be at least {FIRST_ID + 2 * STRETCH_HEADS}, got {self.stop}; "
                "it is the number of token ids that prompts are drawn from"
            )

    def stretch(self, index: int, length: int, *seed: int | str) -> Tokens:
        """``length`` ids of shared stretch number ``index``: its first id is its own, so siblings part at once."""
        if index >= STRETCH_HEADS:
            raise GraniKVError(f"more than {STRETCH_HEADS} distinct shared stretches; lower --ma-groups or --ma-roles")
        if length == 0:
            return ()
        return (FIRST_ID + index, *self._draw(length - 1, *seed))

    def privates(self, lengths: Sequence[int], *seed: int | str) -> list[Tokens]:
        """One private part for each length; no two begin with the same id."""
        if len(lengths) > self.stop - FIRST_ID - STRETCH_HEADS:
            raise GraniKVError("more requests than token ids to tell them apart; raise --ma-vocab")
        rng = generator(*seed, "heads")
        heads = rng.choice(np.arange(FIRST_ID + STRETCH_HEADS, self.stop), size=len(lengths), replace=False).tolist()
        return [
            (head, *self._draw(length - 1, *seed, number)) if length else ()
            for number, (head, length) in enumerate(zip(heads, lengths, strict=True))
        ]

    def _draw(self, length: int, *seed: int | str) -> Tokens:
        return tuple(generator(*seed).integers(FIRST_ID + STRETCH_HEADS, self.stop, size=length).tolist())


def generator(*seed: int | str) -> np.random.Generator:
    """A random generator for a path of numbers and names; independent of Python's hash seed."""
    return np.random.default_rng([zlib.crc32(str(part).encode()) for part in seed])


def one_turn(asks: Sequence[Ask]) -> tuple[Callable[[Answers], tuple[Ask, ...]], ...]:
    """The turns of a workload without dialogue."""
    fixed = tuple(asks)
    return (lambda _answers: fixed,)
