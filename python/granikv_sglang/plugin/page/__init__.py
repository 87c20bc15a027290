"""The live page at ``/granikv`` and its state at ``/granikv/state``: router, schema, and the files a browser gets."""

from granikv_sglang.plugin.page.router import PAGE, STATE, QuietState, SignIn, build_router, page_html
from granikv_sglang.plugin.page.schema import SCHEMA, PageState
from granikv_sglang.plugin.page.source import NoState, StateSource

__all__ = [
    "PAGE",
    "SCHEMA",
    "STATE",
    "NoState",
    "PageState",
    "QuietState",
    "SignIn",
    "StateSource",
    "build_router",
    "page_html",
]
