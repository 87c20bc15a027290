"""What a person sees of tree and pool: the shared part of the radix forest and a coarse map of the slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from granikv_sglang.tree.radix import GraniRadixCache

MAP_CELLS = 480
MOST_NODES = 200
TEXT_TOKENS = 32
"""Tokens shown of a node's text, where showing text is allowed at all."""

TextOf = Callable[[list[int]], str]


def forest(tree: GraniRadixCache, live: Iterable[Any], text_of: TextOf | None = None) -> dict[str, Any]:
    """The nodes that are HOT or held by two or more live requests, parents before children.

    ``private_requests`` and ``private_tokens`` of a node are the live requests that share nothing deeper, and the
    tokens they hold below it; the same two at the top are of requests that share nothing at all. ``text`` is there
    only with ``text_of``. At most :data:`MOST_NODES` nodes; ``omitted`` counts the others.
    """
    members: Counter[int] = Counter()
    nodes: dict[int, Any] = {}
    paths: list[tuple[int, list[Any]]] = []
    for req in live:
        path = list(tree.upwards(req.last_node))
        members.update(node.id for node in path)
        nodes.update({node.id: node for node in path})
        paths.append((len(req.origin_input_ids) + len(req.output_ids), path))
    nodes.update({node.id: node for node in _hot_nodes(tree)})
    shown = {node_id for node_id in nodes if node_id in tree.hot or members[node_id] >= 2}
    private: Counter[int | None] = Counter()
    private_tokens: Counter[int | None] = Counter()
    for tokens, path in paths:
        shared = [node for node in path if node.id in shown]
        deepest = shared[0].id if shared else None
        private[deepest] += 1
        private_tokens[deepest] += max(0, tokens - sum(len(node.key) for node in shared))
    order = sorted((_depth(tree, nodes[i]), -members[i], i) for i in shown)
    rows = [_row(tree, nodes[i], members, private, private_tokens, text_of) for _, _, i in order[:MOST_NODES]]
    return {
        "nodes": rows,
        "omitted": max(0, len(order) - MOST_NODES),
        "private_requests": private[None],
        "private_tokens": private_tokens[None],
    }


def _row(
    tree: GraniRadixCache,
    node: Any,
    members: Counter[int],
    private: Counter[int | None],
    private_tokens: Counter[int | None],
    text_of: TextOf | None,
) -> dict[str, Any]:
    span = tree.hot.get(node.id)
    row = {
        "node": node.id,
        "parent": None if node.parent is tree.root_node else node.parent.id,
        "hot": span is not None,
        "start": span.start if span is not None else None,
        "tokens": len(node.key),
        "members": members[node.id],
        "private_requests": private[node.id],
        "private_tokens": private_tokens[node.id],
    }
    if text_of is not None:
        row["text"] = text_of(list(node.key.token_ids[: min(TEXT_TOKENS, len(node.key))]))
    return row


def _hot_nodes(tree: GraniRadixCache) -> Iterable[Any]:
    # A HOT node hangs below the root or below a HOT node, so no COLD subtree need be walked.
    stack = list(tree.root_node.children.values())
    while stack:
        node = stack.pop()
        if node.id in tree.hot:
            yield node
            stack.extend(node.children.values())


def _depth(tree: GraniRadixCache, node: Any) -> int:
    return sum(1 for _ in tree.upwards(node))


def slot_map(tree: GraniRadixCache, cells: int = MAP_CELLS) -> dict[str, Any]:
    """How much of each stretch of ``cell_slots`` slots is HOT and how much is free; the rest is COLD.

    Slot ids start at 1. The last cell may be shorter. Reads ``cells`` numbers from the device.
    """
    size = tree.allocator.size
    width = -(-size // cells)
    count = -(-size // width)
    free = torch.bincount((tree.allocator.peek_free() - 1) // width, minlength=count).tolist()
    hot = [0] * count
    for span in tree.hot.values():
        at, stop = span.start - 1, span.stop - 1
        while at < stop:
            upto = min(stop, (at // width + 1) * width)
            hot[at // width] += upto - at
            at = upto
    return {"cell_slots": width, "hot": hot, "free": free}
