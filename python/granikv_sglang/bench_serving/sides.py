"""The servers that are compared: started here or found running, asked for state, flushed, asked about near-ties."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.benchmark.serving import get_auth_headers

from granikv_sglang.config import NAME
from granikv_sglang.core import GraniKVError
from granikv_sglang.server.process import Server, free_ports, wait_ready

# A server under test is not reached through a proxy of the environment.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_INFO = ("attention_backend", "dtype", "device", "model_path", "tp_size", "max_total_num_tokens", "load_format")


@dataclass(frozen=True)
class SideSpec:
    """A side: a server to start with ``args``, or one that runs at ``url``."""

    name: str
    args: tuple[str, ...] = ()
    url: str | None = None


class Side:
    """One server of the comparison. ``up`` may be called at any time; a server that is up stays as it is."""

    def __init__(self, spec: SideSpec, folder: Path) -> None:
        self.name = spec.name
        self._spec = spec
        self._folder = folder
        self._server: Server | None = None
        self.starts = 0

    @property
    def url(self) -> str:
        if self._spec.url is not None:
            return self._spec.url
        assert self._server is not None, f"{self.name} is not up"
        return self._server.url

    @property
    def command(self) -> list[str]:
        """How to start this side again, as arguments of the launcher; empty for a server found running."""
        return list(self._spec.args)

    def begin(self) -> Server | None:
        """Start the process if there is none to wait for; None when nothing had to be started."""
        if self._spec.url is not None or self._server is not None:
            return None
        self.starts += 1
        self._server = Server(self.name, free_ports(1)[0], self._spec.args, self._folder)
        return self._server

    def up(self, on_wait: Callable[[int], None]) -> None:
        """Return when it serves. Raises GraniKVError with the log's last lines when it does not start."""
        server = self.begin()
        if server is not None:
            wait_ready([server], on_wait)

    def down(self) -> None:
        """Stop a server that was started here."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def last_words(self) -> str:
        """The end of the log of a server started here, for a message."""
        return self._server.last_words() if self._server is not None else ""

    def info(self) -> dict[str, Any]:
        """What the server says of itself: version and the few arguments that decide what was measured."""
        info = self._open("/server_info")
        return {"version": info.get("version"), **{key: info[key] for key in _INFO if key in info}}

    def state(self) -> dict[str, Any]:
        """GraniKV's part of the server's state; empty on a stock server."""
        return dict(self._open("/server_info")["internal_states"][0].get(NAME) or {})

    def flush(self) -> None:
        """Empty the prefix cache. Raises GraniKVError when it stays full."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self._open("/flush_cache?timeout=30", {}, parse=False)
                return
            except GraniKVError:
                # Refused while the last requests are being taken off: a moment later it is idle.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def freeze_collector(self) -> bool:
        """SGLang's ``/freeze_gc``; False where the server has none.

        One pass of Python's collector over what a server has loaded stops it for about half a second.
        """
        try:
            self._open("/freeze_gc", {}, parse=False)
        except GraniKVError:
            return False
        return True

    def generate(self, prompt: Sequence[int], tokens: int, **extra: Any) -> Any:
        """One greedy request by token ids; the parsed reply."""
        params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        return self._open("/generate", {"input_ids": list(prompt), "sampling_params": params, **extra})

    def top_two(self, prompt: Sequence[int]) -> list[tuple[float, int]]:
        """The two most likely tokens after ``prompt``, best first, as ``(log-probability, token id)``."""
        reply = self.generate(prompt, 1, return_logprob=True, top_logprobs_num=2)
        return [(float(logprob), int(token)) for logprob, token, *_ in reply["meta_info"]["output_top_logprobs"][0]]

    def _open(self, path: str, body: dict[str, Any] | None = None, parse: bool = True) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **get_auth_headers()},
        )
        try:
            with _OPENER.open(request, timeout=600) as reply:
                data = reply.read()
            return json.loads(data) if parse else None
        except (OSError, ValueError) as error:
            why = error.read().decode(errors="replace")[:200] if isinstance(error, urllib.error.HTTPError) else error
            raise GraniKVError(f"the {self.name} server did not answer {path.split('?')[0]}: {why}") from error


def start_all(sides: Sequence[Side], on_wait: Callable[[int], None], *, one_by_one: bool) -> None:
    """Bring every side up; ``one_by_one`` where each sizes its pool by what the one before left free on a GPU."""
    if one_by_one:
        for side in sides:
            side.up(on_wait)
        return
    started = [server for server in (side.begin() for side in sides) if server is not None]
    if started:
        wait_ready(started, on_wait)


def stop_all(sides: Sequence[Side]) -> None:
    """Stop every server that was started here, whatever happens to one of them."""
    for side in sides:
        side.down()
