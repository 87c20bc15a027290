"""The proof of slot conservation: every slot has exactly one owner, and every cached index agrees with the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sglang.srt.mem_cache.radix_cache import TreeNode

from granikv_sglang.core import AuditError
from granikv_sglang.tree.radix import GraniRadixCache


@dataclass(frozen=True)
class HeldRow:
    """One live request's claim: ``req_to_token[row, :allocated]``, of which ``protected`` tokens are the tree's."""

    row: int
    protected: int
    allocated: int
    last_node: TreeNode | None


def audit(cache: GraniRadixCache, held: Sequence[HeldRow], req_to_token: torch.Tensor | None = None) -> None:
    """Prove conservation or raise AuditError naming the first discrepancy.

    Checks: free, tree and privately held slots are disjoint and together are slots 1..size; upstream's evictable and
    protected counts match the tree; HOT spans are the nodes' own contiguous slots, disjoint, and lead every path; each
    request's protected tokens are its path's slots. Reads everything to the host: not for the hot path.
    """
    nodes = _all_nodes(cache)
    owners: dict[int, str] = {}

    def claim(slots: Sequence[int], owner: str) -> None:
        for slot in slots:
            if slot in owners:
                raise AuditError(f"slot {slot} is held by {owners[slot]} and by {owner}")
            owners[slot] = owner

    claim(cache.allocator.free_slots().tolist(), "the free list")
    for node in nodes:
        claim(node.value.tolist(), f"node {node.id}")
        if len(node.value) != len(node.key):
            raise AuditError(f"node {node.id} has {len(node.key)} tokens but {len(node.value)} slots")
    for entry in held:
        if req_to_token is not None:
            claim(req_to_token[entry.row, entry.protected : entry.allocated].tolist(), f"request row {entry.row}")
    missing = set(range(1, cache.allocator.size + 1)) - owners.keys()
    if missing or len(owners) != cache.allocator.size:
        raise AuditError(f"{len(missing)} slots leaked, first {sorted(missing)[:4]}; {len(owners)} owned")
    _check_sizes(cache, nodes)
    _check_spans(cache, nodes)
    if req_to_token is not None:
        _check_rows(cache, held, req_to_token)
    cache.counters.audits += 1


def _all_nodes(cache: GraniRadixCache) -> list[TreeNode]:
    nodes, stack = [], list(cache.root_node.children.values())
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack.extend(node.children.values())
    return nodes


def _check_sizes(cache: GraniRadixCache, nodes: list[TreeNode]) -> None:
    evictable = sum(len(n.key) for n in nodes if n.lock_ref == 0)
    protected = sum(len(n.key) for n in nodes if n.lock_ref > 0)
    if (evictable, protected) != (cache.evictable_size(), cache.protected_size()):
        raise AuditError(
            f"tree holds {evictable} evictable and {protected} protected tokens, "
            f"upstream counts {cache.evictable_size()} and {cache.protected_size()}"
        )


def _check_spans(cache: GraniRadixCache, nodes: list[TreeNode]) -> None:
    by_id = {node.id: node for node in nodes}
    for node_id, span in cache.hot.items():
        node = by_id.get(node_id)
        if node is None:
            raise AuditError(f"HOT span {span} belongs to node {node_id}, which is not in the tree")
        if node.value.tolist() != list(range(span.start, span.stop)):
            raise AuditError(f"node {node_id}'s slots are not its span {span}")
        if node.parent is not cache.root_node and node.parent.id not in cache.hot:
            raise AuditError(f"HOT node {node_id} hangs below COLD node {node.parent.id}")


def _check_rows(cache: GraniRadixCache, held: Sequence[HeldRow], req_to_token: torch.Tensor) -> None:
    for entry in held:
        if entry.last_node is None or entry.protected == 0:
            continue
        path: list[int] = []
        node = entry.last_node
        while node is not cache.root_node:
            path = node.value.tolist() + path
            node = node.parent
        row = req_to_token[entry.row, : entry.protected].tolist()
        if row != path[: entry.protected]:
            raise AuditError(f"request row {entry.row} and its tree path disagree within {entry.protected} tokens")
