"""The shortened walks of ``tree/lean.py`` against upstream's own, side by side on random schedules."""

from __future__ import annotations

import random
from array import array

import pytest
from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode

from granikv_sglang.tree.radix import GraniRadixCache
from support.world import FakeReq, World

BLOCK = 12


class UpstreamWalks(GraniRadixCache):
    """GraniKV's tree with upstream's matching and caching."""

    match_prefix = RadixCache.match_prefix
    cache_unfinished_req = RadixCache.cache_unfinished_req
    cache_finished_req = RadixCache.cache_finished_req


def _ranks(values: dict) -> dict:
    order = {value: rank for rank, value in enumerate(sorted(set(values.values())))}
    return {key: order[value] for key, value in values.items()}


def nodes_of(world: World) -> list[TreeNode]:
    nodes = [world.tree.root_node]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def tree_of(world: World) -> dict:
    """Everything the tree knows, with nodes named by their path and times and ids by their rank."""
    tree, names, stack = world.tree, {}, [((), world.tree.root_node)]
    while stack:
        name, node = stack.pop()
        names[node] = name
        for key, child in node.children.items():
            stack.append(((*name, key, len(child.key)), child))
    nodes = {
        name: (
            node.key.extra_key,
            node.key.token_ids.tolist(),
            list(map(int, node.value)),
            node.lock_ref,
            node.hit_count,
            node.priority,
            tree.hot.get(node.id),
            node.hash_value,
        )
        for node, name in names.items()
    }
    return {
        "nodes": nodes,
        "ages": _ranks({name: node.last_access_time for node, name in names.items()}),
        "ids": _ranks({name: node.id for node, name in names.items()}),
        "leaves": sorted(map(repr, (names[node] for node in tree.evictable_leaves))),
        "sizes": (tree.evictable_size(), tree.protected_size(), tree.total_size(), tree.epoch),
        "events": list(tree.kv_event_queue),
        "counters": world.counters,
        "free": (world.allocator.free_pages.tolist(), world.allocator.release_pages.tolist()),
        "rows": world.rows.req_to_token[[r.req_pool_idx for r in world.live]].tolist(),
        "live": [claims_of(req, names) for req in world.live],
    }


def claims_of(req: FakeReq, names: dict[TreeNode, tuple]) -> tuple:
    return (req.rid, req.cache_protected_len, req.filled, req.prefix_indices.tolist(), names[req.last_node])


class Pair:
    """Two worlds that are told the same."""

    def __init__(self, slots: int, events: bool) -> None:
        self.lean = World(slots=slots, events=events, min_tokens=16, min_sharers=2)
        self.walks = World(slots=slots, events=events, tree=UpstreamWalks, min_tokens=16, min_sharers=2)

    def both(self, act) -> object:
        """``act(world)`` in both; every trace of it must be the same."""
        outcomes = [act(world) for world in (self.lean, self.walks)]
        told = [outcome if not isinstance(outcome, FakeReq) else outcome.rid for outcome in outcomes]
        assert told[0] == told[1]
        lean, walks = tree_of(self.lean), tree_of(self.walks)
        for part in walks:
            assert lean[part] == walks[part], part
        in_tree = {node.id for node in nodes_of(self.lean)}
        assert set(self.lean.tree.kept_paths) <= in_tree
        # Last, since the audit sorts the free list.
        self.lean.check()
        self.walks.check()
        return told[0]

    @property
    def live(self) -> list[FakeReq]:
        return self.lean.live


def prompt(rng: random.Random) -> array:
    """Blocks of a small vocabulary, cut anywhere: splits fall within and between nodes."""
    blocks = [1, *(rng.randint(1, 3) for _ in range(rng.randint(1, 6)))]
    tokens = array("q", [1000 * block + i for block in blocks for i in range(BLOCK)])
    return tokens[: rng.randint(2, len(tokens))] + array("q", [rng.randint(1, 3)] * rng.randint(0, 4))


def retract(world: World, index: int) -> None:
    """As the scheduler does it: nothing is inserted, and prompt and output wait to be matched again."""
    req = world.live[index]
    tokens, key, priority = req.tokens, req.extra_key, req.priority
    world.release(req, insert=False)
    world.admit(tokens, key, priority=priority)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_tree_as_upstream_after_every_operation(seed):
    rng = random.Random(seed)
    pair = Pair(slots=rng.choice([1000, 2500]), events=seed % 2 == 0)
    for _ in range(200):
        action, live = rng.random(), pair.live
        index = rng.randrange(len(live)) if live else None
        if action < 0.25:
            tokens, key, priority = prompt(rng), rng.choice([None, None, None, "b"]), rng.choice([0, 0, 1, 5])
            for _ in range(rng.choice([1, 1, 2])):  # twins: the second finds the first one's tokens
                pair.both(lambda w, t=tokens, k=key, p=priority: w.admit(t, k, priority=p))
        elif action < 0.62 and index is not None:
            req = live[index]
            if req.filled == len(req.tokens):
                token = rng.randint(1, 3)
                pair.both(lambda w, i=index, t=token: w.decode(w.live[i], t))
            else:
                chunk = rng.choice([5, 20, 1000])
                pair.both(lambda w, i=index, c=chunk: w.prefill(w.live[i], w.live[i].filled + c))
        elif action < 0.74 and index is not None:
            insert = rng.random() < 0.7
            pair.both(lambda w, i=index, n=insert: w.release(w.live[i], insert=n))
        elif action < 0.78 and index is not None:
            pair.both(lambda w, i=index: retract(w, i))
        elif action < 0.92:
            pair.both(lambda w: w.promote())
        elif action < 0.985:
            tokens = rng.randint(1, 120)
            pair.both(lambda w, n=tokens: w.evict(n))
        else:
            for _ in range(len(live)):
                pair.both(lambda w: w.release(w.live[0], insert=False))
            pair.both(lambda w: w.flush())
    counters = pair.lean.counters
    assert counters.promotions > 0
    assert counters.hot_splits > 0


def test_a_node_shortened_by_a_split_is_compared_by_what_is_left_of_it():
    pair = Pair(slots=600, events=False)

    def serve(tokens: list[int]) -> None:
        pair.both(lambda w: w.admit(array("q", tokens)))
        pair.both(lambda w: w.prefill(w.live[-1]))

    serve([5, 6, 5, 7, 8])
    serve([5, 6, 5, 7, 8, 1])  # the node is matched whole
    serve([5, 6, 9])  # split: what is left of it is 5 7 8
    serve([5, 6, 5, 6, 5, 1])  # begins like the node as it was


def test_kept_paths_are_bounded(monkeypatch):
    monkeypatch.setattr("granikv_sglang.tree.lean.KEPT_SLOTS", 60)
    pair = Pair(slots=600, events=False)
    for first in range(1, 6):
        for _ in range(2):
            pair.both(lambda w, f=first: w.admit(array("q", [f] * 25 + [9, 9])))
            pair.both(lambda w: w.prefill(w.live[-1]))
            assert sum(pair.lean.tree.kept_paths.values()) <= 60
    assert pair.lean.tree.kept_paths
