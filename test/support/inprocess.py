"""SGLang's real scheduler in this process, driven turn by turn: what arrives in which turn is the test's to say.

The event loop is SGLang's own, in a thread; it stops where it would receive requests and waits for the test. So a test
decides what happens between two scheduling steps, and can look at every request, slot and tree node there.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from granikv_sglang.config import ENV_VAR, NAME, GraniKVConfig
from granikv_sglang.core import Breaker
from granikv_sglang.plugin.promoter import live_requests
from granikv_sglang.tree.audit import HeldRow, audit

TURN_SECONDS = 120.0
POOL = 2048
CHUNK = 64


class _Stop(BaseException):
    """Ends the loop's thread from within recv_requests."""


class Driver:
    """One scheduler with the tiny model, GraniKV on, strict pool checks and our audit in every turn.

    Args:
        model: folder of the checkpoint.
        options: GraniKV's, by field name.
        args: more of SGLang's arguments.
        strict: prove conservation in every turn; off for the benchmark.
    """

    def __init__(self, model: Path, args: Sequence[str] = (), strict: bool = True, **options: Any) -> None:
        # Read once, at import or at start-up, by SGLang.
        os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = str(int(strict))
        os.environ["SGLANG_CHECK_KV_PAGE_INVARIANTS"] = str(int(strict))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        options_before = os.environ.get(ENV_VAR)
        GraniKVConfig(**{"min_tokens": 32, "audit": strict, **options}).to_env()
        self._strict = strict
        from sglang.srt.mem_cache.registry import get_radix_cache_factory  # noqa: PLC0415
        from sglang.srt.plugins import load_plugins  # noqa: PLC0415

        load_plugins()
        os.environ.pop(ENV_VAR) if options_before is None else os.environ.update({ENV_VAR: options_before})
        from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415
        from sglang.srt.runtime_context import publish  # noqa: PLC0415
        from sglang.srt.server_args import PortArgs, prepare_server_args  # noqa: PLC0415

        server_args = prepare_server_args(
            [
                *("--model-path", str(model), "--device", "cpu", "--skip-tokenizer-init"),
                *("--attention-backend", NAME, "--radix-cache-backend", NAME),
                *("--max-total-tokens", str(POOL), "--chunked-prefill-size", str(CHUNK)),
                *("--max-running-requests", "16", "--random-seed", "1", "--log-level", "error"),
                *args,
            ]
        )
        publish(server_args, role="scheduler")
        self.scheduler = Scheduler(server_args, PortArgs.init_new(server_args), 0, 0, 0, 0, 0, 0, None)
        self.runtime = get_radix_cache_factory(NAME).__self__
        self.tree = self.runtime.tree
        self.counters = self.runtime.counters
        self.sent: list[Any] = []
        """What the scheduler has sent out: to the tokenizer's side, in order."""
        self.reqs: dict[str, Any] = {}
        self.turns = 0
        self.expected: dict[tuple[Any, ...], list[int]] = {}
        self._next = 0
        self._inbox: queue.Queue[list[Any] | None] = queue.Queue()
        self._ready: queue.Queue[BaseException | None] = queue.Queue()
        self._connect()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        self._wait()

    # -- turns ---------------------------------------------------------------------------------------------------------

    def turn(self, *inputs: Any) -> None:
        """Deliver ``inputs`` and let the scheduler take one turn of its loop; then prove that no slot is lost."""
        assert self._thread.is_alive(), "the scheduler has ended, see the first failure"
        self._inbox.put(list(inputs))
        self._wait()
        self.turns += 1
        if self._strict:
            self.check()

    def turns_until(self, done: Any, limit: int = 2000) -> None:
        """Take turns until ``done()``; fails when that does not come about."""
        for _ in range(limit):
            if done():
                return
            self.turn()
        raise AssertionError(f"not reached within {limit} turns")

    def settle(self) -> None:
        """Take turns until nothing is left to do, and one more in which SGLang checks its pools at idle."""
        self.turns_until(lambda: self.scheduler.is_fully_idle())
        self.turn()

    def check(self) -> None:
        """Conservation over everything that is live, between two turns."""
        s = self.scheduler
        held = [
            HeldRow(r.req_pool_idx, r.cache_protected_len, r.kv.kv_allocated_len, r.last_node)
            for r in live_requests(s.running_batch, s.last_batch, s.chunked_req)
            if r.kv
        ]
        audit(self.tree, held, self.tree.req_to_token_pool.req_to_token)
        check_groups(self)

    def stop(self) -> None:
        """End the loop."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join(30)

    # -- requests ------------------------------------------------------------------------------------------------------

    def request(self, tokens: Iterable[int], new: int = 8, **fields: Any) -> Any:
        """A tokenised greedy request, to be handed to :meth:`turn`."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput  # noqa: PLC0415
        from sglang.srt.observability.req_time_stats import APIServerReqTimeStats  # noqa: PLC0415
        from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415

        params = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
        params.normalize(None)
        self._next += 1
        return TokenizedGenerateReqInput(
            rid=fields.pop("rid", f"r{self._next}"),
            input_text=None,
            input_ids=array("q", tokens),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            time_stats=APIServerReqTimeStats(),
            **fields,
        )

    def answer(self, *requests: Any) -> list[list[int]]:
        """Deliver requests together, run until idle, and give each one's output tokens."""
        self.turn(*requests)
        self.settle()
        return [self.output(request) for request in requests]

    def output(self, request: Any) -> list[int]:
        """Output tokens of a request that has ended by itself."""
        req = self.reqs[request.rid]
        assert req.finished(), f"{request.rid} has not ended"
        assert req.finished_reason.to_json()["type"] != "abort", f"{request.rid} was aborted"
        return list(req.output_ids)

    def cold(self, tokens: Sequence[int], new: int = 8) -> list[int]:
        """The answer of a run on an empty cache, alone: nothing is shared, the stock backend computes all of it."""
        key = (tuple(tokens), new)
        if key not in self.expected:
            self.settle()
            assert self.flush()
            (self.expected[key],) = self.answer(self.request(tokens, new))
            assert self.flush()
        return self.expected[key]

    def hold_promotions(self) -> None:
        """No promotion from now on, so that a test can bring everything into place first."""
        promoter = self.runtime._promoter
        promoter._config = dataclasses.replace(self.runtime.config, min_sharers=4096)

    def let_promote(self) -> None:
        """Promotions again, from the next turn on; what was declined before counts anew."""
        promoter = self.runtime._promoter
        promoter._config, promoter._looked_at = self.runtime.config, None
        promoter._declined.clear()

    def mend(self) -> None:
        """Engines and promotion are whole again, whatever a test made them do."""
        breakers, promoter = self.runtime._breakers, self.runtime._promoter
        for name, breaker in list(breakers.items()):
            breakers[name] = Breaker(breaker.what, breaker._instead)
        promoter._breaker = Breaker(promoter._breaker.what, promoter._breaker._instead)
        self.runtime._planner.forget()

    def flush(self) -> bool:
        """SGLang's own flush; False when it refuses."""
        return bool(self.control("FlushCacheReqInput").success)

    def abort(self, request: Any) -> Any:
        """The message that a client's abort or disconnect becomes, to be handed to :meth:`turn`."""
        return self.message("AbortReq", rid=request.rid)

    def message(self, name: str, **fields: Any) -> Any:
        """A control message by class name, to be handed to :meth:`turn`."""
        from sglang.srt.managers import io_struct  # noqa: PLC0415

        return getattr(io_struct, name)(**fields)

    def control(self, name: str, **fields: Any) -> Any:
        """Deliver one control message in a turn of its own; its reply (None where there is none)."""
        before = len(self.sent)
        self.turn(self.message(name, **fields))
        replies = [m for m in self.sent[before:] if type(m).__name__ == name.replace("Input", "Output")]
        return replies[0] if replies else None

    # -- inside --------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        channels = self.scheduler.ipc_channels
        for sender in (channels.send_to_tokenizer, channels.send_to_detokenizer):
            sender.send_output = lambda output, _=None: self.sent.append(output)
        self.scheduler.request_receiver = SimpleNamespace(recv_requests=self._recv)
        self.scheduler.idle_sleeper = None
        queued = self.scheduler._add_request_to_queue

        def remember(req: Any, *args: Any, **kwargs: Any) -> None:
            self.reqs[req.rid] = req
            queued(req, *args, **kwargs)

        self.scheduler._add_request_to_queue = remember
        if not self._strict:
            return
        plan_for = self.runtime._plan_for

        def checked(batch: Any) -> Any:
            plan = plan_for(batch)
            if batch.forward_mode.is_decode():
                check_plan(self.tree.req_to_token_pool.req_to_token, batch, plan)
            return plan

        self.runtime._plan_for = checked

    def _recv(self) -> list[Any]:
        self._ready.put(None)
        inputs = self._inbox.get()
        if inputs is None:
            raise _Stop
        return inputs

    def _loop(self) -> None:
        try:
            self.scheduler.run_event_loop()
        except _Stop:
            pass
        except BaseException as error:
            self._ready.put(error)

    def _wait(self) -> None:
        error = self._ready.get(timeout=TURN_SECONDS)
        if error is not None:
            raise error


def check_groups(driver: Driver) -> None:
    """Members of a group hold identical slots: under a HOT node all live requests have the node's run in their rows."""
    s, tree = driver.scheduler, driver.tree
    rows = tree.req_to_token_pool.req_to_token
    for req in live_requests(s.running_batch, s.last_batch, s.chunked_req):
        at = 0
        for _, span in tree.hot_path(req.last_node):
            held = rows[req.req_pool_idx, at : at + span.length].tolist()
            assert held == list(range(span.start, span.stop)), f"{req.rid} does not hold the run of its group"
            at += span.length


def check_plan(req_to_token: Any, batch: Any, plan: Any) -> None:
    """Items are what the plan says: all rows of an item hold its run, each at the place where its items above end."""
    at = [0] * len(batch.reqs)
    for item in plan.items:
        run = list(range(item.start, item.start + item.tokens))
        for row in item.rows:
            held = req_to_token[batch.reqs[row].req_pool_idx, at[row] : at[row] + item.tokens].tolist()
            assert held == run, f"row {row} of an item does not hold its slots"
            at[row] += item.tokens
    for row, covered in enumerate(plan.coverage.tolist()):
        assert covered == at[row]
        assert covered < int(batch.seq_lens_cpu[row]), "a row has no private token left"
