"""GraniKV's options: one frozen dataclass, its command-line flags, and the way it reaches SGLang's worker processes.

SGLang starts its scheduler with ``multiprocessing`` spawn and pickles its own ``ServerArgs`` only, so our options
travel in one environment variable (:data:`ENV_VAR`) that the child inherits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from granikv_sglang.core import GraniKVError, Regime

ENV_VAR = "GRANIKV_OPTIONS"
NAME = "granikv"
"""The name under which the radix cache and the attention backend are registered with SGLang."""

PREFILLS = ("auto", "stock")
SHARINGS = ("groups", "batch")
HOTS = ("on", "off")
REGIMES = ("auto", *(r.value for r in Regime))


HOTNESS = "GraniKV: what becomes HOT"
COMPUTING = "GraniKV: how passes are computed"
LOOKING = "GraniKV: looking and proving"
WAY_OUT = "GraniKV: the way out"
GROUPS = (HOTNESS, COMPUTING, LOOKING, WAY_OUT)
"""Headings of ``--help``, in order."""


def _option(default: Any, flag: str, text: str, group: str = COMPUTING, **kwargs: Any) -> Any:
    return dataclasses.field(default=default, metadata={"flag": flag, "help": text, "group": group, **kwargs})


@dataclass(frozen=True)
class GraniKVConfig:
    """Options of the overlay. Every field is one ``--granikv-*`` flag; defaults are read from here."""

    min_tokens: int = _option(
        512,
        "--granikv-min-tokens",
        "Shortest root path, in tokens, that is promoted into the HOT arena (16 to 1048576).",
        HOTNESS,
    )
    min_sharers: int = _option(
        2, "--granikv-min-sharers", "Live requests that must hold a prefix before it is promoted (2 to 4096).", HOTNESS
    )
    regime: str = _option(
        "auto",
        "--granikv-regime",
        "auto lets the classifier choose for each forward pass; others force one regime wherever a prefix is shared.",
        choices=REGIMES,
    )
    prefill: str = _option(
        "auto",
        "--granikv-prefill",
        "auto reads cached HOT prefixes as dense stretches in prefill; stock leaves every prefill to SGLang's backend.",
        choices=PREFILLS,
    )
    sharing: str = _option(
        "groups",
        "--granikv-sharing",
        "groups reads every prefix once that two requests of a batch share; batch only what the whole batch shares, as "
        "batch-global cascades do (for comparison).",
        choices=SHARINGS,
    )
    hot: str = _option(
        "on",
        "--granikv-hot",
        "off promotes nothing: cascade reads shared prefixes token by token where they lie. To measure what HOT adds; "
        "needs a GPU and --granikv-regime cascade.",
        choices=HOTS,
    )
    stock_backend: str = _option(
        "auto",
        "--granikv-stock-backend",
        "SGLang backend that does prefill and UNIFORM decode; auto is flashinfer on CUDA, torch_native on CPU.",
    )
    show_text: bool = _option(
        False,
        "--granikv-show-text",
        "Show the first words of shared prompts on the live page at /granikv and in /server_info (never otherwise).",
        LOOKING,
    )
    audit: bool = _option(
        False,
        "--granikv-audit",
        "Prove slot conservation at every scheduler step (slow; for tests and bug reports).",
        LOOKING,
    )

    def __post_init__(self) -> None:
        _check_range("--granikv-min-tokens", self.min_tokens, 16, 1 << 20)
        _check_range("--granikv-min-sharers", self.min_sharers, 2, 4096)
        if self.regime not in REGIMES:
            raise GraniKVError(f"--granikv-regime {self.regime!r} is unknown; choose one of {', '.join(REGIMES)}")
        if self.prefill not in PREFILLS:
            raise GraniKVError(f"--granikv-prefill {self.prefill!r} is unknown; choose one of {', '.join(PREFILLS)}")

        if self.sharing not in SHARINGS:
            raise GraniKVError(f"--granikv-sharing {self.sharing!r} is unknown; choose one of {', '.join(SHARINGS)}")
        if self.hot not in HOTS:
            raise GraniKVError(f"--granikv-hot {self.hot!r} is unknown; choose one of {', '.join(HOTS)}")

    @property
    def min_segment(self) -> int:
        """Shortest COLD remainder worth an extent of its own below a HOT prefix, in tokens."""
        return max(16, self.min_tokens // 4)

    def to_env(self, env: MutableMapping[str, str] | None = None) -> None:
        """Store these options in ``env`` (default: this process's) for the processes SGLang spawns."""
        target = os.environ if env is None else env
        target[ENV_VAR] = json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> GraniKVConfig:
        """Options stored by :meth:`to_env`; defaults where there are none. Raises GraniKVError on unreadable ones."""
        text = (os.environ if env is None else env).get(ENV_VAR)
        if not text:
            return cls()
        try:
            values = json.loads(text)
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise GraniKVError(f"{ENV_VAR} is not a JSON object of GraniKV options ({error}); unset it") from error


def _check_range(flag: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high:
        raise GraniKVError(f"{flag} must be a whole number from {low} to {high}, got {value!r}")


def _whole_number(flag: str) -> Any:
    def parse(text: str) -> int:
        try:
            return int(text)
        except ValueError as error:
            raise GraniKVError(f"{flag} must be a whole number, got {text!r}") from error

    return parse


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field of :class:`GraniKVConfig`, under :data:`GROUPS`, plus ``--granikv-off``."""
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for field in dataclasses.fields(GraniKVConfig):
        group = groups[field.metadata["group"]]
        default = "off" if field.default is False else field.default
        flag, text = field.metadata["flag"], f"{field.metadata['help']} Default: {default}."
        if field.type == "bool":
            group.add_argument(flag, dest=field.name, action="store_true", default=field.default, help=text)
        elif field.type == "int":
            group.add_argument(
                flag, dest=field.name, type=_whole_number(flag), default=field.default, metavar="N", help=text
            )
        else:
            # Choices are checked by the dataclass: its message names the mend, argparse's does not.
            choices = field.metadata.get("choices")
            metavar = "{" + ",".join(choices) + "}" if choices else "NAME"
            group.add_argument(flag, dest=field.name, default=field.default, metavar=metavar, help=text)
    groups[WAY_OUT].add_argument(
        "--granikv-off",
        dest="off",
        action="store_true",
        help="Run stock SGLang: none of GraniKV's hooks, pools or backends is loaded. Default: off.",
    )


def from_args(args: argparse.Namespace) -> GraniKVConfig:
    """The options held by a namespace that :func:`add_cli_args` filled. Raises GraniKVError on a value out of range."""
    return GraniKVConfig(**{f.name: getattr(args, f.name) for f in dataclasses.fields(GraniKVConfig)})
