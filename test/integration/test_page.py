"""The live page in a real Chromium, against real servers: under load, on a phone, with a key, over a restart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from transformers import AutoTokenizer

from granikv_sglang.demo.teams import TEAMS
from granikv_sglang.server.process import Server, free_ports, wait_ready
from support.browser import chromium, open_page

KEY = "sesame"
WAIT_MS = 90_000
WORDS = "incident review team of Northquay"
"""Words of the shared prompt: on the page only when showing text was asked for."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def prompt(model) -> list[int]:
    """The beginning of a team's prompt, as token ids."""
    return AutoTokenizer.from_pretrained(model)(TEAMS[0].prefix)["input_ids"]


@contextmanager
def load(server: Server, prompt: list[int], agents: int = 4, shared: int = 600) -> Iterator[None]:
    """Agents that share ``shared`` tokens and ask again and again until the block is left."""
    stop = threading.Event()

    def agent(number: int) -> None:
        turn = 0
        while not stop.is_set():
            own = prompt[800 + 40 * number + turn :][:12]
            body = {
                "input_ids": [*prompt[:shared], 1000 + number, *own],
                "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
            }
            server.post("/generate", body, timeout=300)
            turn += 1

    with ThreadPoolExecutor(agents) as pool:
        running = [pool.submit(agent, number) for number in range(agents)]
        try:
            yield
        finally:
            stop.set()
            for future in running:
                future.result()


def test_the_page_follows_load_and_shows_a_promotion(browser, everyday, prompt):
    everyday.post("/flush_cache?timeout=30", parse=False)
    watched = open_page(browser, everyday.url + "/granikv")
    page = watched.page
    expect(page.locator("#status")).to_have_attribute("data-state", "live", timeout=WAIT_MS)
    expect(page.locator("#forest")).to_contain_text("Nothing is shared")
    before = page.locator("#saved").inner_text()
    with load(everyday, prompt):
        hot = page.locator(".node.hot")
        expect(hot.first).to_contain_text("600 tokens", timeout=WAIT_MS)
        expect(hot.first).to_contain_text("used by 4 requests", timeout=WAIT_MS)
        expect(page.locator("#requests")).to_have_text("4", timeout=WAIT_MS)
        expect(page.locator("#hot")).not_to_have_text("0")
        expect(page.locator("#saved")).not_to_have_text(before, timeout=WAIT_MS)
        expect(page.locator("#decisions tbody tr").first).to_contain_text("shared", timeout=WAIT_MS)
        first = page.locator("#saved").inner_text()
        expect(page.locator("#saved")).not_to_have_text(first, timeout=WAIT_MS)
        state = everyday.get("/granikv/state")
    assert page.locator("#map").get_attribute("aria-label") != ""
    assert sum(state["slot_map"]["hot"]) == state["pool"]["hot"] >= 600
    assert any(not second["passes"]["uniform"] and sum(second["passes"].values()) for second in state["seconds"])
    expect(page.locator("#requests")).to_have_text("0", timeout=WAIT_MS)
    assert watched.errors == []
    assert {url.split("?")[0] for url in watched.requests} == {everyday.url + p for p in ("/granikv", "/granikv/state")}
    page.close()


def test_prompt_text_is_shown_nowhere(browser, everyday, prompt):
    with load(everyday, prompt, agents=2):
        watched = open_page(browser, everyday.url + "/granikv")
        expect(watched.page.locator(".node").first).to_be_visible(timeout=WAIT_MS)
        assert WORDS not in watched.page.content()
        assert WORDS not in str(everyday.get("/granikv/state")) + str(everyday.get("/server_info"))
        assert all(node["text"] is None for node in everyday.get("/granikv/state")["forest"]["nodes"])
    watched.page.close()


@pytest.mark.parametrize(("width", "height"), [(360, 740), (1280, 800)], ids=["phone", "laptop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_and_its_colours_the_scheme(browser, everyday, width, height, scheme):
    watched = open_page(browser, everyday.url + "/granikv", width=width, height=height, color_scheme=scheme)
    page = watched.page
    expect(page.locator("#status")).to_have_attribute("data-state", "live", timeout=WAIT_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground, ink = (
        page.evaluate(f"getComputedStyle(document.body).{name}.match(/\\d+/g).map(Number)")
        for name in ("backgroundColor", "color")
    )
    assert (sum(ground) < sum(ink)) is (scheme == "dark")
    assert abs(luminance(ground) - luminance(ink)) > 0.5
    sizes = page.evaluate(
        "[...document.querySelectorAll('p,td,th,li,h2')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12
    assert watched.errors == []
    page.close()


def luminance(colour: list[int]) -> float:
    return sum(w * c / 255 for w, c in zip((0.2126, 0.7152, 0.0722), colour, strict=False))


def test_with_a_key_and_text_over_a_restart(browser, model, prompt, tmp_path: Path):
    """One browser tab: refused, signed in, sees text, loses the server, finds the next one without being touched."""
    (port,) = free_ports(1)
    args = ["--model-path", str(model), "--max-total-tokens", "4096", "--granikv-min-tokens", "64"]
    args += ["--api-key", KEY, "--granikv-show-text", "--skip-server-warmup"]

    def start(name: str) -> Server:
        server = Server(name, port, args, tmp_path, key=KEY)
        wait_ready([server])
        return server

    server = start("first")
    try:
        watched = open_page(browser, server.url + "/granikv")
        page = watched.page
        expect(page.locator("#sign-in")).to_be_visible()
        page.locator("#key").fill("wrong")
        page.get_by_role("button").click()
        expect(page.locator("#refused")).to_contain_text("refuses this key")
        page.locator("#key").fill(KEY)
        page.get_by_role("button").click()
        expect(page.locator("#status")).to_have_attribute("data-state", "live", timeout=WAIT_MS)
        watched.errors.clear()  # the browser notes the two refusals
        with load(server, prompt):
            expect(page.locator(".node.hot .words").first).to_contain_text(WORDS, timeout=WAIT_MS)
        assert watched.errors == []
        page.reload()
        expect(page.locator("#status")).to_have_attribute("data-state", "live", timeout=WAIT_MS)
        started = server.get("/granikv/state")["started"]
        server.stop()
        expect(page.locator("#status")).to_have_attribute("data-state", "away", timeout=WAIT_MS)
        server = start("second")
        expect(page.locator("#status")).to_have_attribute("data-state", "live", timeout=WAIT_MS)
        assert server.get("/granikv/state")["started"] > started
        watched.errors.clear()  # and the time without a server
        with load(server, prompt):
            expect(page.locator(".node.hot").first).to_contain_text("600 tokens", timeout=WAIT_MS)
        assert watched.errors == []
        page.close()
    finally:
        server.stop()
