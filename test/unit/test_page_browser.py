"""The live page in a real Chromium, fed with states made up here: what it draws, and what it does without a server."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, expect
from sglang.srt.utils.auth import add_api_key_middleware

from granikv_sglang.config import GraniKVConfig
from granikv_sglang.plugin.history import History
from granikv_sglang.plugin.page import SignIn, StateSource, build_router
from granikv_sglang.plugin.state import state_of
from granikv_sglang.server.process import free_ports
from support.browser import chromium, open_page
from support.world import World

KEY = "sesame"


def node(number: int, parent: int | None, tokens: int, members: int, hot: bool = True, **more: Any) -> dict[str, Any]:
    start = 1000 * number if hot else None
    base = {"node": number, "parent": parent, "hot": hot, "start": start, "tokens": tokens, "members": members}
    return {**base, "private_requests": 0, "private_tokens": 0, **more}


class Scheduler:
    """Answers with ``state``; a test changes that between two looks of the page."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = state_of(GraniKVConfig(), "torch_native", World().tree, [], History())

    async def __call__(self) -> list[dict[str, Any]]:
        return [{"granikv": copy.deepcopy(self.state)}]

    def shows(self, *nodes: dict[str, Any], requests: int = 6) -> None:
        self.state["live"]["requests"] = requests
        self.state["live"]["forest"]["nodes"] = list(nodes)


@contextmanager
def serving(scheduler: Scheduler, port: int, key: str | None = None) -> Iterator[str]:
    """The routes on a port, as SGLang's server has them."""
    app = FastAPI()
    app.include_router(build_router(StateSource(scheduler, "models/a-model")))
    if key is not None:
        add_api_key_middleware(app, api_key=key, admin_api_key=None)
        app.add_middleware(SignIn)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "uvicorn did not start"
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}/granikv"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def page(browser, scheduler):
    with serving(scheduler, free_ports(1)[0]) as url:
        watched = open_page(browser, url)
        expect(watched.page.locator("#status")).to_have_attribute("data-state", "live")
        yield watched.page
        assert watched.errors == []
        watched.page.close()


def test_a_promotion_appears_without_a_reload(page, scheduler):
    expect(page.locator("#forest")).to_contain_text("Nothing is shared")
    scheduler.shows(node(1, None, 600, 4, hot=False))
    expect(page.locator(".node .badge")).to_have_text("not HOT")
    scheduler.shows(node(1, None, 600, 4))
    expect(page.locator(".node.hot")).to_contain_text("600 tokens")
    expect(page.locator(".node.hot")).to_contain_text("used by 4 requests")
    expect(page.locator("#hot")).to_have_text("1")


def test_pieces_of_one_prompt_are_one_bar_and_chance_is_none(page, scheduler):
    scheduler.shows(
        node(1, None, 512, 4),
        {**node(2, 1, 88, 4), "start": 1512},
        node(3, 2, 2, 2, hot=False, private_requests=2, private_tokens=20),
        node(4, 2, 100, 2, private_requests=2, private_tokens=9),
    )
    bars = page.locator(".node")
    expect(bars).to_have_count(2)
    expect(bars.nth(0)).to_contain_text("600 tokens")
    expect(bars.nth(0)).to_contain_text("slots 1,000 to 1,599")
    expect(bars.nth(0)).to_contain_text("2 requests go on alone from here, with 24 tokens of their own")
    expect(bars.nth(1)).to_contain_text("100 tokens")
    expect(page.locator("#hot")).to_have_text("2")


def test_prompt_text_is_text(page, scheduler):
    scheduler.shows(node(1, None, 600, 2, text="<img src=x onerror=alert(1)> & <b>bold</b>"))
    expect(page.locator(".words")).to_contain_text("<img src=x onerror=alert(1)> & <b>bold</b>")
    assert page.locator("#forest img, #forest b").count() == 0


def test_counts_reasons_and_declines_are_told_in_words(page, scheduler):
    now = time.time()
    run = {"first": now - 3, "last": now, "regime": "cascade", "reason": "memory_bound", "passes": 1234, "requests": 5}
    live, counters = scheduler.state["live"], scheduler.state["counters"]
    live["decisions"] = [{**run, "stretches": 1, "tokens_read_once": 600}]
    passes = {"uniform": 10, "cascade": 30, "batched_gemm": 0}
    live["seconds"] = [{"second": int(now), "passes": passes, "bytes_not_reread": 5_000_000_000}]
    counters["declines"]["no_room"] = 3
    counters["bytes_not_reread"] = 12_300_000_000
    expect(page.locator("#saved")).to_have_text("12.3 GB")
    expect(page.locator("#saved-rate")).to_have_text("1.0 GB a second now")
    expect(page.locator("#share")).to_have_text("75 %")
    first = page.locator("#decisions tbody tr").first
    expect(first).to_contain_text("reading the prefix is the cost")
    expect(first).to_contain_text("1,234")
    expect(page.locator("#declines")).to_contain_text("No contiguous run is free")
    drawn = page.evaluate(
        "(c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].some(v => v))"
        "(document.querySelector('#chart'))"
    )
    assert drawn


def test_the_map_paints_hot_where_it_lies(page, scheduler):
    cells = scheduler.state["live"]["map"]
    scheduler.state["hot_tokens"] = cells["cell_slots"]
    scheduler.state["pool"]["free"] -= cells["cell_slots"]
    cells["hot"][-2], cells["free"][-2] = cells["cell_slots"], 0
    expect(page.locator("#map")).to_have_attribute("aria-label", f"{cells['cell_slots']} slots HOT, 0 COLD, 2,043 free")
    orange, grey = (page.evaluate(PIXEL, len(cells["hot"]) - back) for back in (2, 3))
    assert orange[0] > 150 > orange[2]
    assert abs(grey[0] - grey[2]) < 30


PIXEL = """i => {
  const c = document.querySelector('#map'), columns = 60, side = c.width / columns;
  const rows = Math.ceil(410 / columns), tall = c.height / rows;
  const x = (i % columns + 0.4) * side, y = (Math.floor(i / columns) + 0.4) * tall;
  return [...c.getContext('2d').getImageData(x, y, 1, 1).data];
}"""


def test_a_tap_on_the_map_tells_what_lies_there(page):
    page.locator("#map").hover(position={"x": 5, "y": 5})
    expect(page.locator("#map")).to_have_attribute("title", "slots 1 to 5: 0 HOT, 0 COLD, 5 free")


def test_signed_in_it_survives_reload_and_restart(browser, scheduler):
    (port,) = free_ports(1)
    with serving(scheduler, port, KEY) as url:
        watched = open_page(browser, url)
        page = watched.page
        page.locator("#key").fill("wrong")
        page.get_by_role("button").click()
        expect(page.locator("#refused")).to_contain_text("refuses this key")
        page.locator("#key").fill(KEY)
        page.get_by_role("button").click()
        status = page.locator("#status")
        expect(status).to_have_attribute("data-state", "live")
        expect(page.locator("#json")).to_be_hidden()
        page.reload()
        expect(status).to_have_attribute("data-state", "live")
        assert KEY not in page.url
    expect(status).to_have_attribute("data-state", "away", timeout=20_000)
    again = Scheduler()
    again.shows(node(7, None, 700, 3))
    with serving(again, port, KEY):
        expect(status).to_have_attribute("data-state", "live", timeout=20_000)
        expect(page.locator(".node.hot")).to_contain_text("700 tokens")
        page.close()


def test_a_key_that_has_changed_asks_again(browser, scheduler):
    (port,) = free_ports(1)
    with serving(scheduler, port, KEY) as url:
        page = open_page(browser, url).page
        page.locator("#key").fill(KEY)
        page.get_by_role("button").click()
        expect(page.locator("#status")).to_have_attribute("data-state", "live")
    with serving(scheduler, port, "another"):
        expect(page.locator("#sign-in")).to_be_visible(timeout=20_000)
        expect(page.locator("#refused")).to_contain_text("refuses the key of before")
        page.close()
