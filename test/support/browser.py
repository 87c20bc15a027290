"""A real headless Chromium for tests of pages: Debian's, or the one that Playwright has brought."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright

FLAGS = (
    # As root in a container there is no sandbox to be had; nothing but our own pages is opened.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    # Without these, Chromium tries to reach its makers at every start.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
MISSING = "no Chromium: `apt-get install chromium`, or name one in GRANIKV_CHROMIUM"


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, or a skip that says how to get one; where GRANIKV_NEEDS_BROWSER is set, a failure instead."""
    path = os.environ.get("GRANIKV_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        except Error as error:
            if os.environ.get("GRANIKV_NEEDS_BROWSER"):
                pytest.fail(f"{MISSING} ({str(error).splitlines()[0]})")
            pytest.skip(MISSING)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page and everything its console said."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def open_page(browser: Browser, url: str, *, width: int = 1280, height: int = 800, **options: Any) -> Watched:
    """A page of its own context at ``url``, its console watched from the first moment."""
    page = browser.new_page(viewport={"width": width, "height": height}, **options)
    watched = Watched(page)
    page.on("console", lambda message: watched.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.on("request", lambda request: watched.requests.append(request.url))
    page.goto(url)
    return watched
