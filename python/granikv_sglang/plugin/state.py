"""GraniKV's state as JSON-ready values, for /server_info and the live page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from granikv_sglang import __version__
from granikv_sglang.config import GraniKVConfig
from granikv_sglang.plan.table import Calibration, constants_to_json
from granikv_sglang.plugin.history import History
from granikv_sglang.plugin.view import TextOf, forest, slot_map
from granikv_sglang.tree.radix import GraniRadixCache


def state_of(
    config: GraniKVConfig,
    stock_backend: str,
    tree: GraniRadixCache,
    live: list[Any],
    history: History | None = None,
    text_of: TextOf | None = None,
    graphs: dict[str, Any] | None = None,
    classifier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What the arena holds and what has happened so far.

    ``extents`` lists HOT nodes by first slot: ``start`` and ``tokens`` in slots, ``members`` the live requests below
    the node. ``pool.largest_free_run`` is in slots. Counters are those of :class:`granikv_sglang.core.Counters`.
    ``live`` (with ``history``) is for the page: see :mod:`granikv_sglang.plugin.page.schema`. ``text_of`` turns token
    ids into text and is given only under ``--granikv-show-text``. ``graphs`` is what the graph variants cost, see
    :meth:`granikv_sglang.plugin.variants.GraphVariants.cost`; ``classifier`` is :func:`classifier_state`'s.
    """
    members: Counter[int] = Counter(node_id for req in live for node_id, _ in tree.hot_path(req.last_node))
    state: dict[str, Any] = {
        "version": __version__,
        "options": dataclasses.asdict(config),
        "stock_backend": stock_backend,
        "extents": [
            {"node": node_id, "start": span.start, "tokens": span.length, "members": members[node_id]}
            for node_id, span in tree.extents()
        ],
        "hot_tokens": tree.hot_tokens(),
        "pool": {
            "slots": tree.allocator.size,
            "free": tree.allocator.available_size(),
            "largest_free_run": tree.allocator.largest_free_run(),
        },
        "counters": tree.counters.as_dict(),
    }
    if graphs is not None:
        state["graphs"] = graphs
    if classifier is not None:
        state["classifier"] = classifier
    if history is not None:
        state["live"] = {
            "started": round(history.started, 3),
            "requests": len(live),
            "forest": forest(tree, live, text_of),
            "map": slot_map(tree),
            "seconds": history.seconds(),
            "decisions": history.decisions(),
        }
    return state


def classifier_state(calibration: Calibration) -> dict[str, Any]:
    """Which constants the classifier goes by, in words and numbers, and what was not used and why."""
    return {
        "source": calibration.source,
        "line": calibration.line,
        "refused": list(calibration.refused),
        "provenance": dict(calibration.provenance),
        "constants": constants_to_json(calibration.constants),
    }
