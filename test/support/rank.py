"""One of two tensor-parallel ranks without a model: ``python -m support.rank RANK PORT``, a long random schedule each.

One JSON line per scenario: a hash after every step, the counters, the message where it stopped. Faults are rank 1's.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import sys
import time
from array import array
from datetime import timedelta

import torch.distributed as dist

from granikv_sglang.core import GraniKVError
from granikv_sglang.plan import Classifier, Kind, Machine, Planner, Shape, analytic
from granikv_sglang.plugin.ranks import RankCheck, group_like, rank_state
from support.world import World

STEPS = 500
FAULT_AT = 200
SCENARIOS = ("none", "ties", "copy", "eviction", "regime", "promotion", "answer", "death")
"""``death`` ends the process of rank 1, so it comes last."""


def prompt(rng: random.Random) -> array:
    """A few fixed blocks of 24 tokens and an odd end."""
    tokens = array("q")
    for block in [rng.choice([1, 1, 1, 2]), *(rng.randint(1, 4) for _ in range(rng.randint(1, 6)))]:
        tokens.extend(1000 * block + i for i in range(24))
    return tokens + array("q", [10 + rng.randint(0, 50)])


class Rank:
    """A world whose every decision goes to a RankCheck."""

    def __init__(self, rank: int, fault: str, wait_seconds: float) -> None:
        self.rank, self.fault = rank, fault if rank == 1 else ""
        self.world = World(slots=2300, min_tokens=32, min_sharers=2)
        tree = self.world.tree
        # 16 passes, not 32, so that a fault shows within the schedule whatever it is.
        group = group_like(dist.group.WORLD, wait_seconds)
        self.ranks = RankCheck(group, lambda: rank_state(tree), self.world.counters, every=16)
        tree.on_answer = lambda tokens: self.ranks.note("answer", *tokens)
        promoter = self.world.promoter
        promoter._ranks = self.ranks
        self.planner = self._planner(0.05)
        self.heap_noise: list[object] = []
        self.lines: list[str] = []

    def _planner(self, margin: float) -> Planner:
        # A stock backend so slow per request that even these short prefixes are shared.
        base = analytic(Machine(Kind.CPU, 1))
        slow = dataclasses.replace(base.uniform, row_us=1000.0)
        return Planner(
            Classifier(dataclasses.replace(base, uniform=slow, margin=margin)),
            shape=Shape(6, 2, 32, 4, 2),
            counters=self.world.counters,
            note=self.ranks.note,
        )

    def step(self, number: int, rng: random.Random) -> None:
        world, action = self.world, rng.random()
        if self.fault and number == FAULT_AT:
            self.break_()
        # Other addresses on every rank: nothing may depend on the order of a set of objects.
        self.heap_noise.append(bytearray((self.rank + 1) * 40 + number % 7))
        if action < 0.35:
            req = world.admit(prompt(rng), rng.choice([None, None, "b"]))
            if rng.random() < 0.85 and req is not None and not world.prefill(req):
                world.release(req, insert=False)
        elif action < 0.6 and world.live:
            req = rng.choice(world.live)
            world.decode(req, 7) if req.filled == len(req.tokens) else world.prefill(req, req.filled + 40)
        elif action < 0.75 and world.live:
            world.release(rng.choice(world.live), insert=rng.random() < 0.6)
        elif action < 0.95:
            world.promote()
        else:
            world.evict(rng.randint(1, 500))
        paths = [world.tree.hot_path(req.last_node) for req in world.live]
        tokens = sum(len(req.tokens) for req in world.live)
        self.planner.decode(number, lambda: paths, lambda: tokens)
        self.ranks.passed()
        self.lines.append(f"{number} {self.ranks._hash.hexdigest()} {rank_state(world.tree)[:9]}")

    def break_(self) -> None:
        """What may go wrong on one rank alone."""
        if self.fault == "eviction":
            self.world.evict(60)
        elif self.fault == "regime":
            self.planner = self._planner(1.0)
        elif self.fault == "promotion":
            self.world.promoter._promote_best = lambda *_: None
        elif self.fault == "answer":
            self.world.tree.on_answer = lambda tokens: self.ranks.note("answer", 7, *tokens)
        elif self.fault == "copy":
            self.world.promoter._copy = _fails
        elif self.fault == "death":
            sys.exit(9)


def _fails(*_: object) -> None:
    raise MemoryError("no memory on this rank")


def run(rank: int, fault: str) -> dict[str, object]:
    """One scenario in a fresh world; both ranks come out of it, whatever happens."""
    one = Rank(rank, fault, wait_seconds=30.0)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("granikv_sglang").addHandler(handler)
    rng, message = random.Random(5), ""
    try:
        for number in range(STEPS):
            one.step(number, rng)
            if number % 50 == 0:
                one.world.check()
    except GraniKVError as error:
        message = str(error)
    finally:
        logging.getLogger("granikv_sglang").removeHandler(handler)
    return {
        "scenario": fault,
        "steps": one.lines,
        "counters": one.world.counters.as_dict(),
        "message": message,
        "logged": logged,
    }


def main(rank: int, port: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    clock = time.monotonic
    for fault in SCENARIOS:
        # With ties the clock stands still: whatever is ordered by time is a tie.
        time.monotonic = (lambda: 0.0) if fault == "ties" else clock
        print(json.dumps(run(rank, fault)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
