"""The two routes of the live page, and what a browser without the server's API key gets instead of a bare 401."""

from __future__ import annotations

import logging
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, HTTPException
from fastapi.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from granikv_sglang.plugin.page.schema import PageState
from granikv_sglang.plugin.page.source import NoState, StateSource

PAGE = "/granikv"
STATE = "/granikv/state"
HEADERS = {
    # Everything is in the one document: nothing is loaded from anywhere, this server included, but the state.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@cache
def page_html() -> str:
    """The page, one document: markup, style and script put together."""
    return _document("page.html", "page.js")


@cache
def sign_in_html() -> str:
    """What a browser shows that came without the API key: asks for it, holds no data."""
    return _document("sign_in.html", "sign_in.js")


def _document(markup: str, script: str) -> str:
    folder = files("granikv_sglang.plugin.page")
    parts = {name: (folder / name).read_text() for name in (markup, "page.css", script)}
    return parts[markup].replace("/* style */", parts["page.css"]).replace("/* script */", parts[script])


def build_router(source: StateSource) -> APIRouter:
    """Routes ``/granikv`` and ``/granikv/state``."""
    router = APIRouter(tags=["granikv"])

    @router.get(PAGE, response_class=HTMLResponse, summary="GraniKV's live page")
    async def page() -> HTMLResponse:
        """A page that shows what is shared at this moment and keeps itself up to date."""
        return HTMLResponse(page_html(), headers=HEADERS)

    @router.get(STATE, summary="What GraniKV's live page shows, as JSON", responses={503: {"description": "No state"}})
    async def state() -> PageState:
        """The shared prefixes, the slots, the last forward passes and the reasons for them, and all counters."""
        try:
            return await source.state()
        except NoState as error:
            raise HTTPException(503, str(error)) from error

    return router


class QuietState(logging.Filter):
    """Keeps the page's own polling, one line a second for each viewer, out of uvicorn's access log."""

    def filter(self, record: logging.LogRecord) -> bool:
        # uvicorn: (client, method, path, HTTP version, status)
        match record.args:
            case (_, "GET", str(path), _, 200):
                return path.partition("?")[0] != STATE
        return True


class SignIn:
    """ASGI layer around SGLang's check of the API key: a refused browser at ``/granikv`` gets a form, still with 401.

    Every other answer and every other path pass through untouched; the key itself is checked by SGLang alone.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PAGE or not _wants_html(scope):
            await self._app(scope, receive, send)
            return
        refused = False

        async def watched(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == 401:
                refused = True
            elif not refused:
                await send(message)

        await self._app(scope, receive, watched)
        if refused:
            await HTMLResponse(sign_in_html(), 401, headers=HEADERS)(scope, receive, send)


def _wants_html(scope: Scope) -> bool:
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])
