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
    claims = [("the free list", cache.allocator.peek_free())]
    for node in nodes:
        if len(node.value) != len(node.key):
            raise AuditError(f"node {node.id} has {len(node.key)} tokens but {len(node.value)} slots")
        claims.append((f"node {node.id}", node.value))
    if req_to_token is not None:
        claims += [(f"request row {h.row}", req_to_token[h.row, h.protected : h.allocated].long()) for h in held]
    _check_owners(claims, cache.allocator.size)
    _check_sizes(cache, nodes)
    _check_spans(cache, nodes)
    if req_to_token is not None:
        _check_rows(cache, held, req_to_token)
    cache.counters.audits += 1


def _check_owners(claims: list[tuple[str, torch.Tensor]], size: int) -> None:
    """Every slot of 1..size is claimed exactly once; the padding slot 0 never."""
    times = torch.bincount(torch.cat([slots for _, slots in claims]), minlength=size + 1)
    wrong = torch.nonzero(times != 1).flatten().tolist()
    if wrong == [0] and times[0] == 0 and times.numel() == size + 1:
        return
    slot = next(s for s in wrong if s != 0 or times[0] > 0)
    owners = [owner for owner, slots in claims if bool((slots == slot).any())]
    if not owners:
        raise AuditError(f"{int((times[1:] == 0).sum())} slots leaked, first {slot}")
    raise AuditError(f"slot {slot} of {size} is held by " + " and by ".join(owners))


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
        nodes = reversed(list(cache.upwards(entry.last_node)))
        path = [slot for node in nodes for slot in node.value.tolist()]
        row = req_to_token[entry.row, : entry.protected].tolist()
        if row != path[: entry.protected]:
            raise AuditError(f"request row {entry.row} and its tree path disagree within {entry.protected} tokens")
