"""Writes the generated parts of the documentation from the code.

``python benchmark/docs_tables.py [NAME ...] [--check]``. A generated part stands between ``<!-- generated: NAME -->``
and ``<!-- end: NAME -->``. What the code does not say (why a flag is refused, what to do about a reason code) is in the
tables below; a row that the code has and a table lacks is an error, so nobody adds a hook or a reason without a line of
documentation.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import serving_tables

if TYPE_CHECKING:
    from granikv_sglang.plugin.hooks import Hook

ROOT = Path(__file__).resolve().parents[1]

WITHOUT_HOOK: Mapping[str, str] = {
    "build_allocator": "SGLang's own allocator would be built: it has no contiguous runs, nothing could be promoted.",
    "at_safe_point": "Nothing would ever be promoted.",
    "around_run_batch": "Every pass would be UNIFORM: correct, and no faster than stock.",
    "after_cached_tokens": "Serving would be right, but `usage` would not say how many cached tokens were HOT.",
    "before_generate_request": "An extra key could spell the namespace of another tenant or adapter.",
    "around_batched": "Serving would be right; a batch of prompts given as token ids would begin later, as in stock.",
    "around_send": "Serving would be right; such a batch would be sent one by one, its first prefill one request.",
    "around_tokenized": "One request with a token id outside the vocabulary would end the server, as in stock.",
    "around_extra_key": "An extra key could spell another tenant's cache salt.",
    "after_internal_state": "Serving would be right, but nobody could see what HOT does.",
    "around_capture": "On a GPU a shared pass would have no graph to replay.",
    "around_variant": "On a GPU a shared pass would replay the stock graph and read metadata that nobody set up.",
    "around_support_triton": "SGLang would take Triton code paths on a machine without a GPU, and fail there.",
    "before_http_server": "There would be no live page; `/server_info` would still carry the state.",
    "after_api_key": "A browser could not open the live page of a server with an API key.",
    "before_batch_output": "`usage` would not say how many cached tokens were HOT.",
    "around_response_usage": "`usage` would not say how many cached tokens were HOT.",
    "around_streaming_usage": "`usage` would not say how many cached tokens were HOT.",
    "HotChatResponse": "The number would be made and not printed.",
    "HotChatStreamResponse": "The number would be made and not printed.",
    "HotCompletionResponse": "The number would be made and not printed.",
    "HotCompletionStreamResponse": "The number would be made and not printed.",
}
"""Handler of a hook -> what would be lost or wrong if the server ran without it."""

WHY_REFUSED: Mapping[str, str] = {
    "disable_radix_cache": "HOT prefixes are nodes of the radix cache.",
    "page_size": "Slots are handed out, split and freed one by one; whole pages are not proven.",
    "enable_hierarchical_cache": "It is a radix cache of its own, with copies of slots on the host.",
    "enable_lmcache": "It is a radix cache of its own.",
    "enable_flexkv": "It is a radix cache of its own.",
    "speculative_algorithm": "A verify pass has several query tokens per row; the plan covers one.",
    "disaggregation_mode": "A KV transfer in flight refers to slots that a promotion would move.",
    "enable_dp_attention": "The rows of a pass are then not the rows of the scheduler's batch.",
    "pp_size": "Several micro-batches are in flight at the safe point; promotion knows of one.",
    "dcp_size": "One token's KV then lies on one of several ranks.",
    "enable_mixed_chunk": "Prefill rows in a decode pass are not in the plan.",
    "enable_pdmux": "Prefill and decode run on two streams; promotion is ordered on one.",
    "enable_two_batch_overlap": "The batch is split after it was planned.",
    "enable_streaming_session": "A session holds slots that belong to no live request.",
    "enable_session_radix_cache": "A session holds slots that belong to no live request.",
    "enable_hisparse": "KV leaves the device, and a pass reads only part of it.",
    "enable_unified_memory": "KV is then not one tensor per layer that an extent can be a view of.",
    "tokenizer_worker_num": "Cache salt and extra key would be joined where GraniKV's hook does not run.",
    "dllm_algorithm": "A diffusion step decodes a block, not one token per row.",
    "kv_cache_dtype": "Scales of a quantised cache are not folded into the shared pass yet.",
}
"""Attribute of ServerArgs, as in checks.py -> why."""

ADVICE: Mapping[str, str] = {
    "not_decode": "Nothing to do.",
    "nothing_shared": "If you expected sharing: look at `declines`, and are prompts equal from the first token on?",
    "too_small": "Normal for short prefixes or few members; to compare, force a regime with `--granikv-regime`.",
    "over_capacity": "Normal above 1024 requests in one batch; otherwise report it with `doctor --json`.",
    "engine_off": "Look for 'GraniKV: a fault in' in the server's log, and report it; restart to try again.",
    "forced": "Set `--granikv-regime auto` to let the classifier choose.",
    "memory_bound": "Nothing to do: this is a shared pass.",
    "compute_bound": "Nothing to do: this is a shared pass.",
    "communication_bound": "Nothing to do: this is a shared pass.",
    "launch_bound": "Nothing to do: this is a shared pass.",
    "near_tie": "Nothing to do: the regimes are predicted to be about equally fast.",
    "hot_prefill": "Nothing to do: a prefill that reads its HOT prefixes as dense stretches.",
    "too_short": "Lower `--granikv-min-tokens` if such prefixes are read for many steps.",
    "few_sharers": "Lower `--granikv-min-sharers` if it is above 2.",
    "no_saving": "Normal when answers are short: the copy would cost more than it saves.",
    "no_room": "The pool is too full or fragmented: raise `--max-total-tokens` or `--mem-fraction-static`.",
    "switched_off": "As for `copy_failed`; restart to try again.",
    "copy_failed": "Look for an out-of-memory message in the server's log; lower `--mem-fraction-static`.",
}
"""Value of a Reason or Decline -> what a person does about it."""

ADAPTERS = (
    ("granikv_sglang.pools.allocator", "ElasticAllocator"),
    ("granikv_sglang.tree.lean", "LeanRadixCache"),
    ("granikv_sglang.tree.radix", "GraniRadixCache"),
    ("granikv_sglang.backends.attention", "GraniKVAttnBackend"),
    ("granikv_sglang.plugin.platform", "GraniCpuPlatform"),
)
"""Our subclasses of SGLang's classes."""


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; ``|`` and line breaks within cells are made harmless."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    for row in rows:
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines)


def _said(notes: Mapping[str, str], key: str, what: str) -> str:
    if key not in notes:
        raise SystemExit(f"docs_tables: {what} {key!r} has no line in benchmark/docs_tables.py; write one")
    return notes[key]


# -- docs/upstream.md -------------------------------------------------------------------------------------------------


def hooks() -> str:
    """Every row of the hook table."""
    from granikv_sglang.plugin.hooks import TABLE  # noqa: PLC0415  (imports SGLang, seconds)

    return _hooks(TABLE)


def front_hooks() -> str:
    """Every row of the HTTP process's hook table."""
    from granikv_sglang.plugin.front import FRONT_TABLE  # noqa: PLC0415  (imports SGLang, seconds)

    return _hooks(FRONT_TABLE)


def _hooks(rows: Iterable[Hook]) -> str:
    def short(target: str) -> str:
        return f"`{target.removeprefix('sglang.srt.')}`"

    cells = [
        (short(h.target), h.kind.value, h.why, h.until, _said(WITHOUT_HOOK, h.handler, "the hook handled by"))
        for h in rows
    ]
    return table(("target, below `sglang.srt`", "kind", "why", "can go when", "without it"), cells)


def adapters() -> str:
    """Our subclasses of SGLang's classes and the upstream methods each of them overrides."""
    rows = []
    for module, name in ADAPTERS:
        cls = getattr(importlib.import_module(module), name)
        parent = cls.__mro__[1]
        own = [n for n, member in vars(cls).items() if inspect.isfunction(member) and not n.startswith("__")]
        overridden = [f"`{n}`" for n in own if any(n in vars(base) for base in cls.__mro__[1:])]
        upstream = f"`{parent.__module__.removeprefix('sglang.srt.')}.{parent.__name__}`"
        rows.append((f"`{module.removeprefix('granikv_sglang.')}.{name}`", upstream, ", ".join(overridden)))
    return table(("ours", "subclass of, below `sglang.srt`", "overrides"), rows)


# -- docs/configuration.md --------------------------------------------------------------------------------------------

_RANGE = re.compile(r" \((\d+) to (\d+)\)\.$")


def option_range(field: dataclasses.Field[object]) -> str:
    """What a flag accepts, in words: its choices, or the range at the end of its help text."""
    if field.metadata.get("choices"):
        return ", ".join(f"`{choice}`" for choice in field.metadata["choices"])
    if field.type == "bool":
        return "given or not"
    found = _RANGE.search(field.metadata["help"])
    return f"{found[1]} to {found[2]}" if found else "a name"


def flags() -> str:
    """Every ``--granikv-*`` flag."""
    from granikv_sglang.config import GraniKVConfig, add_cli_args  # noqa: PLC0415

    fields = dataclasses.fields(GraniKVConfig)
    rows = [
        (
            f"`{f.metadata['flag']}`",
            "off" if f.default is False else f"`{f.default}`",
            option_range(f),
            _RANGE.sub(".", f.metadata["help"]),
        )
        for f in fields
    ]
    parser = argparse.ArgumentParser(add_help=False)
    add_cli_args(parser)
    ours = {f.metadata["flag"] for f in fields}
    for action in parser._actions:
        if action.option_strings[0] not in ours:
            effect = (action.help or "").removesuffix(" Default: off.")
            rows.append((f"`{action.option_strings[0]}`", "off", "given or not", effect))
    return table(("flag", "default", "accepts", "effect"), rows)


def _codes(cls: type[StrEnum]) -> str:
    from granikv_sglang.core import descriptions  # noqa: PLC0415

    texts = descriptions(cls)
    rows = []
    for member in cls:
        meaning = _said(texts, member.value, f"{cls.__name__} (a docstring in core/types.py; it)")
        rows.append((f"`{member.value}`", meaning, _said(ADVICE, member.value, cls.__name__)))
    return table(("code", "meaning", "what to do"), rows)


def reasons() -> str:
    """Reason codes of forward passes."""
    from granikv_sglang.core import Reason  # noqa: PLC0415

    return _codes(Reason)


def declines() -> str:
    """Reason codes of promotions that did not happen."""
    from granikv_sglang.core import Decline  # noqa: PLC0415

    return _codes(Decline)


def refusals() -> str:
    """Every refused flag with its reason and the mend."""
    from granikv_sglang.plugin.checks import _REFUSED  # noqa: PLC0415

    rows = [(_flag(flag), _said(WHY_REFUSED, name, "the refused flag"), mend) for name, _, flag, mend in _REFUSED]
    return table(("refused", "why", "instead"), rows)


def refused_flags() -> str:
    """The refused flags in one paragraph, for the README."""
    from granikv_sglang.plugin.checks import _REFUSED  # noqa: PLC0415

    return ", ".join(_flag(flag) for _, _, flag, _ in _REFUSED) + "."


def _flag(text: str) -> str:
    """``--page-size above 1`` -> the flag as code, the rest as text."""
    name, _, rest = text.partition(" ")
    return f"`{name}`" + (f" {rest}" if rest else "")


def metrics() -> str:
    """Every Prometheus metric."""
    from granikv_sglang.plugin.metrics import METRICS  # noqa: PLC0415  (imports SGLang, seconds)

    rows = [
        (f"`{m.name}`", "counter" if m.is_counter else "gauge", ", ".join(f"`{x}`" for x in m.labels), m.text)
        for m in METRICS
    ]
    return table(("metric", "kind", "own labels", "meaning"), rows)


# -- docs/state.md ----------------------------------------------------------------------------------------------------


def page_state() -> str:
    """Every field of the answer of ``/granikv/state``, one table a kind of object."""
    from granikv_sglang.plugin.page import schema  # noqa: PLC0415

    kinds = (schema.PageState, schema.Pool, schema.Forest, schema.Node, schema.SlotMap, schema.Second)
    parts = []
    for cls in (*kinds, schema.DecisionRun):
        rows = [
            (f"`{name}`", _type(field.annotation), field.description or _summary(field.annotation))
            for name, field in cls.model_fields.items()
        ]
        parts.append(f"### {cls.__name__}\n{_summary(cls)}\n\n{table(('field', 'type', 'meaning'), rows)}")
    return "\n\n".join(parts)


def _type(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    return f"`{text.replace('granikv_sglang.plugin.page.schema.', '')}`"


def _summary(cls: object) -> str:
    return (inspect.getdoc(cls) or "").splitlines()[0]


# -- docs/sharing.md ---------------------------------------------------------------------------------------------------


def prompt_order() -> str:
    """The last run of benchmark/prompt_order.py: three orders of one prompt."""
    lines = (ROOT / "benchmark" / "results" / "prompt_order.jsonl").read_text().splitlines()
    return prompt_order_table([json.loads(line) for line in lines[-3:]])


def prompt_order_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A row for each order: what had to be computed, what came from the cache, what was not read again."""
    cells = []
    for row in rows:
        low, high = row["seconds_range"]
        cells.append(
            (
                row["order"],
                f"{row['computed_tokens']:,} of {row['prompt_tokens']:,}",
                f"{row['cached_tokens']:,}",
                f"{row['hot_tokens']:,}",
                f"{row['bytes_not_reread'] / 1e9:.1f} GB",
                f"{row['seconds']:.0f} ({low:.0f} to {high:.0f})",
            )
        )
    titles = ("order", "prompt tokens computed", "cached", "of them HOT", "prefix not read again", "seconds")
    return table(titles, cells)


# -- docs/results.md ---------------------------------------------------------------------------------------------------


def _serving(rows_of: Callable[[Iterable[Mapping[str, Any]]], Any]) -> str:
    from granikv_sglang.bench_serving.results import in_order, load  # noqa: PLC0415  (imports SGLang, seconds)

    files = sorted((ROOT / "benchmark" / "results" / "serving").glob("*.jsonl"))
    return table(*rows_of(in_order(load(files))))


# -- files ------------------------------------------------------------------------------------------------------------

FILES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "upstream": {"hooks": hooks, "front-hooks": front_hooks, "adapters": adapters},
    "state": {"page-state": page_state},
    "sharing": {"prompt-order": prompt_order},
    "configuration": {
        "flags": flags, "refusals": refusals, "metrics": metrics,
    },
    "operations": {"reasons": reasons, "declines": declines},
    "readme": {"refused-flags": refused_flags},
    "results": {
        "serving": lambda: _serving(serving_tables.loads),
        "decomposition": lambda: _serving(serving_tables.decomposition),
    },
}  # fmt: skip
"""Name on the command line -> generated parts of that file."""


def path_of(name: str) -> Path:
    """The file behind a name of :data:`FILES`."""
    return ROOT / "README.md" if name == "readme" else ROOT / "docs" / f"{name}.md"


def filled(name: str) -> str:
    """The text of a file with its generated parts brought up to date."""
    text = path_of(name).read_text()
    for part, make in FILES[name].items():
        begin, end = f"<!-- generated: {part} -->", f"<!-- end: {part} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"docs_tables: {path_of(name).name} needs {begin} and {end} exactly once")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, or with ``--check`` only say which are out of date; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python benchmark/docs_tables.py", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FILES)}; all when none is given")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a file is out of date")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in FILES]
    if unknown:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(FILES)}")
    stale = []
    for name in options.names or FILES:
        text = filled(name)
        if text != path_of(name).read_text():
            stale.append(path_of(name).relative_to(ROOT))
            if not options.check:
                path_of(name).write_text(text)
    for path in stale:
        print(f"{path}: {'out of date' if options.check else 'brought up to date'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
