"""Which shared prefix to promote next. Pure functions of plain values: no tree, no tensors, no clock.

Rank-identical input gives the same answer on every tensor-parallel rank; ties go to the lower node id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from granikv_sglang.core import Decline

COPY_READS = 3
"""What a promotion costs, in reads of the prefix: one read, one write, and the index updates that go with it."""

PART_SHARE = 4
"""Where no run takes a whole stretch, one that takes this part of it does: extents on a path stay few."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One tree node that live requests hold, as the policy sees it.

    ``path_tokens`` is the root path's length with this node included; ``remaining`` holds, for each live request under
    the node, the decode steps it may still take.
    """

    node_id: int
    parent_id: int | None
    tokens: int
    path_tokens: int
    hot: bool
    remaining: tuple[int, ...]

    @property
    def sharers(self) -> int:
        return len(self.remaining)


@dataclass(frozen=True, slots=True)
class Segment:
    """A COLD stretch of one root path to copy into one extent: consecutive nodes, top first."""

    node_ids: tuple[int, ...]
    tokens: int
    saved_reads: int

    @property
    def saving(self) -> int:
        """Token reads saved over the steps that remain, the copy paid."""
        return self.tokens * (self.saved_reads - COPY_READS)

    def least_part(self, min_segment: int) -> int:
        """Leading tokens worth an extent of their own, where there is no room for all."""
        return max(min_segment, -(-self.tokens // PART_SHARE))

    def part(self, room: int, min_segment: int) -> int:
        """Leading tokens to put into a run of ``room`` slots; 0 where it is too short.

        What is left of the segment, if anything, is worth an extent of its own.
        """
        if room >= self.tokens:
            return self.tokens
        part = min(room, self.tokens - min_segment)
        return part if part >= self.least_part(min_segment) else 0


def reads_saved(remaining: Sequence[int]) -> int:
    """Reads of a prefix that sharing avoids: every step reads once for all live members instead of once each."""
    return sum(remaining) - max(remaining, default=0)


def rank_segments(
    views: Sequence[NodeView], *, min_tokens: int, min_sharers: int, min_segment: int
) -> tuple[list[Segment], list[tuple[int, Decline]]]:
    """The segments worth promoting, and for each shared stretch that is not its top node and the reason.

    Args:
        views: every node held by a live request, parents before children.
        min_tokens, min_sharers: thresholds on the root path's length and on live requests.
        min_segment: shortest COLD stretch worth an extent of its own, in tokens.

    Returns:
        The segments, the one worth most first, and the declines, in the order of ``views``.
    """
    segments: list[Segment] = []
    declines: list[tuple[int, Decline]] = []
    for outcome in _candidates(views, min_tokens, min_sharers, min_segment):
        if isinstance(outcome, Segment):
            segments.append(outcome)
        else:
            declines.append(outcome)
    segments.sort(key=lambda segment: (-segment.saving, segment.node_ids[-1]))
    return segments, declines


def _candidates(
    views: Sequence[NodeView], min_tokens: int, min_sharers: int, min_segment: int
) -> Iterator[Segment | tuple[int, Decline]]:
    by_id = {view.node_id: view for view in views}
    children: dict[int | None, list[NodeView]] = {}
    for view in views:
        children.setdefault(view.parent_id if view.parent_id in by_id else None, []).append(view)
    # A stretch starts at a shared COLD node below the root or below a HOT node, so HOT always covers a leading span.
    for top in views:
        parent = by_id.get(top.parent_id) if top.parent_id is not None else None
        if top.hot or top.sharers < 2 or (parent is not None and not parent.hot):
            continue
        yield from _stretches([top], children, min_tokens, min_sharers, min_segment)


def _stretches(
    nodes: list[NodeView],
    children: dict[int | None, list[NodeView]],
    min_tokens: int,
    min_sharers: int,
    min_segment: int,
) -> Iterator[Segment | tuple[int, Decline]]:
    """Candidates that start with ``nodes``: down to the first node deep enough, then on while nobody leaves."""
    nodes = _extend_while_same(nodes, children)
    last = nodes[-1]
    if last.sharers < min_sharers:
        yield nodes[0].node_id, Decline.FEW_SHARERS
        return
    tokens = sum(node.tokens for node in nodes)
    if last.path_tokens < min_tokens or tokens < min_segment:
        shared_below = [c for c in children.get(last.node_id, []) if c.sharers >= 2 and not c.hot]
        if not shared_below:
            yield nodes[0].node_id, Decline.TOO_SHORT
        for child in shared_below:
            yield from _stretches([*nodes, child], children, min_tokens, min_sharers, min_segment)
        return
    segment = Segment(tuple(node.node_id for node in nodes), tokens, reads_saved(last.remaining))
    yield segment if segment.saving > 0 else (nodes[0].node_id, Decline.NO_SAVING)


def _extend_while_same(nodes: list[NodeView], children: dict[int | None, list[NodeView]]) -> list[NodeView]:
    """Follow the path down while all sharers stay on it: what was split by a request now gone is one stretch still."""
    while True:
        same = [c for c in children.get(nodes[-1].node_id, []) if c.sharers == nodes[-1].sharers and not c.hot]
        if len(same) != 1:
            return nodes
        nodes = [*nodes, same[0]]
