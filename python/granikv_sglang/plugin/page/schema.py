"""What ``/granikv/state`` answers. These descriptions are the documentation: OpenAPI and docs/state.md repeat them."""

from __future__ import annotations

from pydantic import BaseModel, Field

SCHEMA = 1
"""Grows when a field is renamed, removed, or changes its meaning; new fields do not change it."""


class Node(BaseModel):
    """One node of the radix tree that is HOT or held by two or more live requests."""

    node: int = Field(description="The node's number; unique while the server runs.")
    parent: int | None = Field(description="The node above it, null directly below the root.")
    hot: bool = Field(description="Whether its KV lies in one contiguous run of slots.")
    start: int | None = Field(description="First slot of that run; null when it is not HOT.")
    tokens: int = Field(description="Tokens of this node alone, its parents' not counted.")
    members: int = Field(description="Live requests whose prompt begins with it.")
    private_requests: int = Field(description="Those of them that share nothing deeper than this node.")
    private_tokens: int = Field(description="Tokens these hold below it, for themselves.")
    text: str | None = Field(None, description="Its first words; only under `--granikv-show-text`.")


class Forest(BaseModel):
    """The shared part of the radix tree, parents before children."""

    nodes: list[Node] = Field(description="At most 200 nodes, the most shared of each depth first.")
    omitted: int = Field(description="Nodes left out because there were more.")
    private_requests: int = Field(description="Live requests that share nothing.")
    private_tokens: int = Field(description="Tokens they hold.")


class SlotMap(BaseModel):
    """The slots in order, cut into equal stretches. What is neither HOT nor free is COLD."""

    cell_slots: int = Field(description="Slots of one stretch; the last one may be shorter.")
    hot: list[int] = Field(description="HOT slots of each stretch.")
    free: list[int] = Field(description="Free slots of each stretch.")


class Second(BaseModel):
    """One second in which at least one forward pass ran."""

    second: int = Field(description="Seconds since the epoch, whole.")
    passes: dict[str, int] = Field(description="Forward passes by regime.")
    bytes_not_reread: int = Field(description="K and V bytes of shared prefix not read again.")


class DecisionRun(BaseModel):
    """Passes in a row that got the same regime for the same reason."""

    first: float = Field(description="When the first of them began, seconds since the epoch.")
    last: float = Field(description="When the last of them began.")
    regime: str = Field(description="How attention was computed.")
    reason: str = Field(description="Why; `words` explains the code.")
    passes: int = Field(description="How many.")
    requests: int = Field(description="Requests in the last of them.")
    stretches: int = Field(description="Shared stretches of prefix in the last of them.")
    tokens_read_once: int = Field(description="Tokens of those stretches, each read once for all its members.")


class Pool(BaseModel):
    """The slots, in numbers."""

    slots: int = Field(description="All slots; one holds K and V of one token in all layers.")
    free: int = Field(description="Free slots.")
    hot: int = Field(description="Slots in HOT runs.")
    largest_free_run: int = Field(description="Longest run of free slots: the longest prefix that fits without moving.")


class PageState(BaseModel):
    """Everything the page at ``/granikv`` shows."""

    schema_version: int = Field(SCHEMA, description="Version of this schema.")
    version: str = Field(description="GraniKV's version.")
    model: str = Field(description="Name of the model served.")
    stock_backend: str = Field(description="SGLang's attention backend that does everything not shared.")
    started: float = Field(description="When the scheduler started, seconds since the epoch.")
    now: float = Field(description="When this state was taken, by the server's clock.")
    age_s: float = Field(description="Seconds since then; above 0 when the scheduler was too busy to answer at once.")
    show_text: bool = Field(description="Whether `--granikv-show-text` was given.")
    requests: int = Field(description="Live requests: running, or with a prompt being read.")
    pool: Pool
    forest: Forest
    slot_map: SlotMap
    seconds: list[Second] = Field(description="The last 120 seconds in which anything ran, oldest first.")
    decisions: list[DecisionRun] = Field(description="The last 24 runs of equal decisions, newest first.")
    counters: dict[str, int] = Field(description="Counts since the start; they only grow.")
    passes: dict[str, dict[str, int]] = Field(description="Forward passes since the start: regime, reason, count.")
    declines: dict[str, int] = Field(description="Shared prefixes that were not promoted, by reason.")
    words: dict[str, str] = Field(description="What each regime, reason and decline code means, in a sentence.")
