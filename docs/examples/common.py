"""What the examples have in common: the command line, the connection, the texts, and the account of what HOT saved."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
import urllib.error
import urllib.request
from typing import Any

import sglang as sgl

from granikv_sglang.demo import text_library

RULES = text_library.SYSTEM
BRIEF = text_library.DOCUMENT
SECTIONS = ["## " + part.strip() for part in BRIEF.split("\n## ")[1:]]


class Server:
    """A running server: where it is, and its state."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key

    def state(self) -> dict[str, Any]:
        """The JSON behind the live page; docs/state.md describes it. Ends the program in one line without a server."""
        request = urllib.request.Request(f"{self.url}/granikv/state")
        if self.api_key:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            mend = "give --api-key" if error.code == 401 else "start it with GraniKV on"
            sys.exit(f"{self.url} answers {error.code}; {mend}")
        except OSError as error:
            sys.exit(f"no server at {self.url} ({error}); start one with `make serve`, or give --url")

    def frontend(self) -> sgl.RuntimeEndpoint:
        """The backend for `sgl.function` programs, with the chat format of the embedded model."""
        return sgl.RuntimeEndpoint(self.url, api_key=self.api_key, chat_template_name="chatml")


def connect(description: str) -> tuple[Server, argparse.Namespace]:
    """Parse the command line that all examples have, and make sure that the server is there."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="server; default: %(default)s")
    parser.add_argument("--api-key", default=None, help="key of the server, when it has one")
    parser.add_argument("--tokens", type=int, default=32, help="longest answer, in tokens; default: %(default)s")
    options = parser.parse_args()
    server = Server(options.url, options.api_key)
    server.state()
    return server, options


def say(who: str, text: str) -> None:
    """One contribution, wrapped."""
    body = textwrap.fill(" ".join(text.split()) or "(no answer)", 96, initial_indent="  ", subsequent_indent="  ")
    print(f"{who}\n{body}\n", flush=True)


class Saved:
    """``with Saved(server):`` prints, at the end, what HOT saved in between."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __enter__(self) -> None:
        self._before, self._start = self._server.state(), time.monotonic()

    def __exit__(self, kind: object, *_details: object) -> None:
        if kind is not None:
            return
        time.sleep(0.6)  # the server shows a state of half a second's age again
        after, before = self._server.state(), self._before
        grown = {name: value - before["counters"][name] for name, value in after["counters"].items()}
        steps = _total(after) - _total(before)
        print(f"What HOT saved, in {time.monotonic() - self._start:.0f} s")
        print(
            f"  made HOT               {grown['promotions']} prefixes, {grown['promoted_tokens']:,} tokens copied once"
        )
        print(f"  lie in HOT now         {after['pool']['hot']:,} tokens")
        print(f"  steps that shared      {grown['shared_steps']} of {steps}")
        print(f"  prefix not read again  {grown['bytes_not_reread'] / 1e9:.2f} GB of keys and values")


def _total(state: dict[str, Any]) -> int:
    return sum(count for reasons in state["passes"].values() for count in reasons.values())
