"""The live page's routes: what is served, to whom, and how often the scheduler is asked."""

from __future__ import annotations

import asyncio
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from granikv_sglang.config import GraniKVConfig
from granikv_sglang.core import Counters, Decline, Reason, Regime
from granikv_sglang.plugin.front import Front
from granikv_sglang.plugin.history import History
from granikv_sglang.plugin.page import NoState, PageState, QuietState, SignIn, StateSource, build_router, page_html
from granikv_sglang.plugin.page.router import sign_in_html
from granikv_sglang.plugin.state import state_of
from support.world import World

KEY = "a key nobody guesses"
HTML = {"Accept": "text/html,application/xhtml+xml"}


def scheduler_state() -> list[dict[str, Any]]:
    return [{"granikv": state_of(GraniKVConfig(), "torch_native", World().tree, [], History())}]


async def answers() -> list[dict[str, Any]]:
    return scheduler_state()


def app_of(ask=answers, key: str | None = None) -> FastAPI:
    app = FastAPI()
    app.include_router(build_router(StateSource(ask, "a-model")))
    if key is not None:
        add_api_key_middleware(app, api_key=key, admin_api_key=None)
        app.add_middleware(SignIn)
    return app


def test_the_page_and_its_state_are_served():
    client = TestClient(app_of())
    page = client.get("/granikv", headers=HTML)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    state = PageState.model_validate(client.get("/granikv/state").json())
    assert (state.model, state.schema_version, state.requests) == ("a-model", 1, 0)
    assert state.pool.slots == 2048
    assert state.show_text is False


def test_every_code_has_words():
    words = TestClient(app_of()).get("/granikv/state").json()["words"]
    assert set(words) == {member.value for cls in (Regime, Reason, Decline) for member in cls}
    assert all(text.endswith(".") for text in words.values())


def test_counters_are_those_of_the_process():
    state = TestClient(app_of()).get("/granikv/state").json()
    plain = {name for name, value in Counters().as_dict().items() if isinstance(value, int)}
    assert set(state["counters"]) == plain
    assert set(state["passes"]) == {regime.value for regime in Regime}
    assert set(state["declines"]) == {decline.value for decline in Decline}


def test_the_schema_is_documented_in_openapi():
    api = TestClient(app_of()).get("/openapi.json").json()
    answer = api["paths"]["/granikv/state"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer["$ref"].endswith("/PageState")
    for name in ("PageState", "Forest", "Node", "SlotMap", "Second", "DecisionRun", "Pool"):
        for field, schema in api["components"]["schemas"][name]["properties"].items():
            assert schema.get("description") or "$ref" in schema, f"{name}.{field} is not described"


@pytest.mark.parametrize("html", [page_html(), sign_in_html()], ids=["page", "sign-in"])
def test_a_document_is_whole_and_loads_nothing(html):
    assert "/* style */" not in html and "/* script */" not in html
    assert not re.findall(r"(?:https?:)?//[a-z0-9]", re.sub(r"^\s*//.*$", "", html, flags=re.MULTILINE))
    assert not re.findall(r"<(?:link|script|img)[^>]+(?:src|href)=\"(?!data:)", html)
    assert "innerHTML" not in html  # prompt text is text, never markup


def test_headers_forbid_loading_and_framing():
    policy = TestClient(app_of()).get("/granikv").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize(
    ("args", "logged"),
    [
        (("127.0.0.1:5", "GET", "/granikv/state", "1.1", 200), False),
        (("127.0.0.1:5", "GET", "/granikv/state?x=1", "1.1", 200), False),
        (("127.0.0.1:5", "GET", "/granikv/state", "1.1", 401), True),
        (("127.0.0.1:5", "POST", "/generate", "1.1", 200), True),
        ((), True),
    ],
)
def test_the_pages_polling_stays_out_of_the_access_log(args, logged):
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "%s", args, None)
    assert QuietState().filter(record) is logged


# -- the API key ------------------------------------------------------------------------------------------------------


def test_without_the_key_state_is_refused_as_everything_is():
    client = TestClient(app_of(key=KEY))
    for headers in ({}, {"Authorization": "Bearer wrong"}, HTML):
        reply = client.get("/granikv/state", headers=headers)
        assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"})
    assert client.get("/granikv/state", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_a_browser_without_the_key_gets_a_form_and_still_401():
    client = TestClient(app_of(key=KEY))
    reply = client.get("/granikv", headers=HTML)
    assert reply.status_code == 401
    assert reply.text == sign_in_html()
    assert reply.headers["cache-control"] == "no-store"
    assert client.get("/granikv").json() == {"error": "Unauthorized"}
    assert client.get("/granikv", headers={**HTML, "Authorization": f"Bearer {KEY}"}).text == page_html()


def test_the_layer_touches_no_other_path():
    app = app_of(key=KEY)
    client = TestClient(app)
    assert client.get("/granikv/other", headers=HTML).json() == {"error": "Unauthorized"}
    assert client.get("/anything", headers=HTML).json() == {"error": "Unauthorized"}


# -- the source -------------------------------------------------------------------------------------------------------


class Asked:
    """A scheduler that counts how often it is asked and answers when it is let."""

    def __init__(self) -> None:
        self.times = 0
        self.free = asyncio.Event()

    async def __call__(self) -> list[dict[str, Any]]:
        self.times += 1
        await self.free.wait()
        return scheduler_state()


def test_many_viewers_ask_the_scheduler_once():
    async def scene() -> int:
        ask = Asked()
        source = StateSource(ask, "m")
        ask.free.set()
        await asyncio.gather(*(source.state() for _ in range(20)))
        await source.state()
        return ask.times

    assert asyncio.run(scene()) == 1


def test_a_busy_scheduler_gives_the_last_state_and_its_age(monkeypatch):
    monkeypatch.setattr("granikv_sglang.plugin.page.source.PATIENCE_S", 0.01)

    async def scene() -> tuple[PageState, PageState]:
        now = [100.0]
        ask = Asked()
        source = StateSource(ask, "m", lambda: now[0])
        ask.free.set()
        first = await source.state()
        ask.free.clear()
        now[0] += 7.0
        return first, await source.state()

    first, second = asyncio.run(scene())
    assert (first.age_s, second.age_s) == (0.0, 7.0)
    assert second.now == first.now


def test_a_scheduler_that_never_answered_is_503(monkeypatch):
    monkeypatch.setattr("granikv_sglang.plugin.page.source.FIRST_PATIENCE_S", 0.01)

    async def never() -> list[dict[str, Any]]:
        await asyncio.sleep(3600)
        return []

    reply = TestClient(app_of(never)).get("/granikv/state")
    assert reply.status_code == 503
    assert "has not answered" in reply.json()["detail"]


def test_a_state_without_ours_is_said():
    async def stock() -> list[dict[str, Any]]:
        return [{}]

    with pytest.raises(NoState, match="no part of GraniKV"):
        asyncio.run(StateSource(stock, "m").state())


# -- where it hangs ---------------------------------------------------------------------------------------------------


def server_args(**changes: Any) -> SimpleNamespace:
    values = {
        "attention_backend": "granikv",
        "radix_cache_backend": "granikv",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "served_model_name": "named",
        "model_path": "/models/path",
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({}, True),
        ({"attention_backend": None, "radix_cache_backend": None}, False),
    ],
)
def test_the_routes_are_hung_into_sglangs_app_when_granikv_is_selected(monkeypatch, changes, there):
    app = FastAPI()
    monkeypatch.setattr("sglang.srt.entrypoints.http_server.app", app)
    Front().before_http_server(server_args(**changes), SimpleNamespace(get_internal_state=answers))
    assert (TestClient(app).get("/granikv").status_code == 200) is there
