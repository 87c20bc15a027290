"""A server as a subprocess on a free port: its log in a file, stopped whatever happens."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from granikv_sglang.core import GraniKVError

HOST = "127.0.0.1"
START_SECONDS = 400.0
STOP_SECONDS = 15.0

# Lines of SGLang's log that mark how far a start has come. Cosmetic: a missing one only makes the bar jump later.
MILESTONES = (
    "server_args=",
    "Load weight begin",
    "Load weight end",
    "KV Cache is allocated",
    "Application startup complete",
)

# These servers run on this machine: a proxy from the environment must not see it.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on at this moment, all different.

    Not those that the kernel hands out by itself: a server listens only once its model is loaded, and by then one of
    the sockets that it has opened itself may have got the port.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        # All are held until the last is found: a port given back at once may be found again.
        for port in random.sample(_OWN_PORTS, len(_OWN_PORTS)):
            if len(found) == count:
                break
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                found.append(port)
    return found


def _first_handed_out() -> int:
    """The lowest port that the kernel gives to sockets which ask for none; Linux's default where it cannot be read."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


_OWN_PORTS = range(10000, max(11000, min(32768, _first_handed_out())))


class Server:
    """One server process. ``name`` is for messages; ``log`` is the file with all its output; ``key`` its API key."""

    def __init__(self, name: str, port: int, args: Sequence[str], folder: Path, key: str | None = None) -> None:
        self.name = name
        self._key = key
        self.port = port
        self.log = folder / f"{name.lower()}.log"
        self._milestones = 0
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "granikv_sglang.launch_server", "--host", HOST, "--port", str(self.port), *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                # A group of its own: Ctrl-C reaches the caller alone, which then stops the server in order.
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def poll_ready(self) -> bool:
        """True once it serves. Raises GraniKVError when it has ended; the message names the log and its last lines."""
        code = self._process.poll()
        if code is not None:
            raise GraniKVError(f"the {self.name} server ended with exit code {code} while starting{self.last_words()}")
        try:
            self.get("/health", timeout=5.0, parse=False)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def new_milestones(self) -> int:
        """How many more of :data:`MILESTONES` the log holds than at the last call."""
        text = self.log.read_text(errors="replace")
        seen = sum(mark in text for mark in MILESTONES)
        new, self._milestones = seen - self._milestones, seen
        return new

    def last_words(self, lines: int = 8) -> str:
        """End of a message: where the log is, and its last lines."""
        text = self.log.read_text(errors="replace").replace("\r", "\n")
        tail = [line[:200] for line in text.splitlines() if line.strip()][-lines:]
        return "\n".join([f"; log: {self.log}", *(f"  | {line}" for line in tail)])

    def get(self, path: str, timeout: float = 60.0, parse: bool = True) -> Any:
        """GET a path of the server; the parsed JSON, or None with ``parse=False``."""
        return self._open(urllib.request.Request(self.url + path), timeout, parse)

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 120.0, parse: bool = True) -> Any:
        """POST JSON to a path of the server."""
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body or {}).encode(), headers={"Content-Type": "application/json"}
        )
        return self._open(request, timeout, parse)

    def granikv_state(self) -> dict[str, Any]:
        """GraniKV's part of the server's state; empty on a stock server."""
        return dict(self.get("/server_info")["internal_states"][0].get("granikv") or {})

    def ask_to_stop(self) -> None:
        """What Ctrl-C in its own terminal would do; returns at once."""
        if self._process.poll() is None:
            self._signal(signal.SIGINT, group=False)

    def stop(self) -> None:
        """End the server: asked first, then made to. Safe to call twice."""
        self.ask_to_stop()
        if self._process.poll() is None:
            # A second Ctrl-C while this waits means: now.
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._process.wait(STOP_SECONDS)
        # Its workers are in its process group; normally nobody is left there.
        self._signal(signal.SIGKILL, group=True)
        self._process.wait()

    def _signal(self, number: signal.Signals, *, group: bool) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def _open(self, request: urllib.request.Request, timeout: float, parse: bool) -> Any:
        if self._key is not None:
            request.add_header("Authorization", f"Bearer {self._key}")
        with _OPENER.open(request, timeout=timeout) as reply:
            body = reply.read()
        return json.loads(body) if parse else None


@contextlib.contextmanager
def serving(*servers: Server) -> Iterator[None]:
    """In the ``with`` block all of ``servers`` serve; behind it they are stopped, also where one did not start."""
    try:
        wait_ready(servers)
        yield
    finally:
        stop_all(servers)


def stop_all(servers: Sequence[Server]) -> None:
    """End all servers, side by side."""
    for server in servers:
        server.ask_to_stop()
    for server in servers:
        server.stop()


def wait_ready(
    servers: Sequence[Server], on_wait: Callable[[int], None] = lambda _: None, limit: float = START_SECONDS
) -> None:
    """Return when all serve; call ``on_wait`` with new milestones about twice a second. Raises GraniKVError."""
    deadline = time.monotonic() + limit
    waiting = list(servers)
    while waiting:
        waiting = [server for server in waiting if not server.poll_ready()]
        on_wait(sum(server.new_milestones() for server in servers))
        if not waiting:
            return
        if time.monotonic() > deadline:
            slow = waiting[0]
            raise GraniKVError(f"the {slow.name} server did not start within {limit:.0f} s{slow.last_words()}")
        time.sleep(0.5)
