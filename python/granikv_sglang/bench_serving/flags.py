"""Our flags beside SGLang's, and the loads they describe."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from granikv_sglang.bench_serving.shapes import POPULARITIES, SHAPES, MultiAgent
from granikv_sglang.bench_serving.trace import BLOCK
from granikv_sglang.core import GraniKVError

MULTI_AGENT, TRACE = "multi-agent", "trace"
STATES = ("cold", "warm", "steady")
LEAST_REPETITIONS = 3
_SPEC = MultiAgent()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag that SGLang's benchmark does not have."""
    add_load_flags(parser)
    group = parser.add_argument_group("trace", "--dataset-name trace: a local file in Mooncake's format")
    group.add_argument(
        "--trace-block-size", type=int, default=BLOCK, metavar="N", help="tokens of a block (default: %(default)s)"
    )
    group.add_argument("--trace-skip-broken", action="store_true", help="leave broken lines out instead of stopping")
    _add_comparison_flags(parser)
    group = parser.add_argument_group("report")
    group.add_argument(
        "--report", type=Path, metavar="DIR", help="write an HTML page with plots, PNG files and the JSON lines there"
    )
    group.add_argument(
        "--report-from",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: make the report of these JSON lines",
    )


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``--dataset-name multi-agent``, which are those of ``--point`` too."""
    group = parser.add_argument_group(
        "multi-agent",
        "--dataset-name multi-agent: prompts with exact token ids, so no tokenizer is needed. Several values "
        "of the first three flags make a grid",
    )
    group.add_argument("--ma-shape", nargs="+", metavar="SHAPE", help=f"{', '.join(SHAPES)} (default: {_SPEC.shape})")
    group.add_argument(
        "--ma-agents", nargs="+", type=int, metavar="N", help=f"requests at once (default: {_SPEC.agents})"
    )
    group.add_argument(
        "--ma-prefix-len",
        nargs="+",
        type=int,
        metavar="N",
        help=f"tokens of the shared prefix, the longest one where lengths differ (default: {_SPEC.prefix})",
    )
    for flag, default, text in (
        ("--ma-private-len", _SPEC.private, "tokens of each agent's own part"),
        ("--ma-output-len", _SPEC.output, "output tokens of each request"),
        ("--ma-groups", None, "prefixes of heterogeneous (default: 8), team prompts of forest (default: 1)"),
        ("--ma-roles", _SPEC.roles, "role prompts below each team prompt of forest"),
        ("--ma-role-len", _SPEC.role, "tokens of a role prompt"),
        ("--ma-rounds", _SPEC.rounds, "turns of rounds"),
        ("--ma-vocab", _SPEC.vocab, "token ids are drawn from below this number"),
    ):
        group.add_argument(flag, type=int, default=default, metavar="N", help=text + _default(default))
    for flag, number, text in (
        ("--ma-length-ratio", _SPEC.length_ratio, "longest to shortest prefix of heterogeneous"),
        ("--ma-zipf-alpha", _SPEC.zipf_alpha, "exponent of zipf popularity"),
    ):
        group.add_argument(flag, type=float, default=number, metavar="X", help=text + _default(number))
    group.add_argument(
        "--ma-popularity",
        default=_SPEC.popularity,
        metavar="NAME",
        help=f"agents per group of heterogeneous: {' or '.join(POPULARITIES)}" + _default(_SPEC.popularity),
    )
    group.add_argument(
        "--ma-fanout",
        type=int,
        nargs="+",
        default=list(_SPEC.fanout),
        metavar="N",
        help="group sizes of fanout (default: 2 4)",
    )


def _add_comparison_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison", "servers take turns, A B A B; no speed-up without validity")
    group.add_argument(
        "--compare",
        metavar="stock|URL",
        help="stock starts GraniKV and stock SGLang here; a URL is a stock server that runs, GraniKV's is --base-url",
    )
    group.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=ARGS",
        help="with --compare stock: one more GraniKV server with these arguments, compared with the same stock server",
    )
    group.add_argument(
        "--repetitions",
        type=int,
        default=LEAST_REPETITIONS,
        metavar="N",
        help="of each side" + _default(LEAST_REPETITIONS),
    )
    group.add_argument(
        "--prefix-state",
        choices=STATES,
        default=None,
        help="cache before each repetition: cold is flushed; warm (default of multi-agent) is flushed, then each "
        "shared prefix read once; steady is flushed, then a whole unmeasured run with other private parts",
    )
    group.add_argument(
        "--point",
        action="append",
        default=[],
        metavar="FLAGS",
        help="one more load, as --ma flags in one string; may be repeated",
    )
    for flag, text in (
        ("--args-both", "launcher arguments of every server that is started"),
        ("--args-granikv", "launcher arguments of GraniKV's servers only"),
        ("--args-stock", "launcher arguments of the stock server only"),
    ):
        group.add_argument(flag, default="", metavar="ARGS", help=f"{text}, in one string")
    group.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="stop one server before the other starts, for models that fill the device",
    )
    group.add_argument(
        "--stream-interval",
        type=int,
        default=1,
        metavar="N",
        help="tokens between two chunks of a stream (default: 1); a fast server is held back by small chunks",
    )
    group.add_argument(
        "--tie-bound",
        type=float,
        metavar="X",
        help="log-probabilities closer than this are a tie (default: 0.001 in float32, 0.2 in 16 bits)",
    )


def _default(value: object) -> str:
    return "" if value is None else f" (default: {value})"


def specs_of(options: argparse.Namespace) -> list[MultiAgent]:
    """The multi-agent loads of a command line: the grid, then every ``--point``. Raises GraniKVError."""
    named = any(value is not None for value in (options.ma_shape, options.ma_agents, options.ma_prefix_len))
    specs = _grid(options) if named or not options.point else []
    for text in options.point:
        parser = _PointParser(prog="--point", add_help=False, allow_abbrev=False)
        add_load_flags(parser)
        own = {key: value for key, value in vars(options).items() if key.startswith("ma_")}
        parser.set_defaults(**own)
        point = parser.parse_args(_words("--point", text), argparse.Namespace(seed=options.seed))
        specs += _grid(point)
    labels = [spec.label for spec in specs]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise GraniKVError(f"the load {twice!r} is asked for twice; each --point needs its own shape, agents or length")
    return specs


def _grid(options: argparse.Namespace) -> list[MultiAgent]:
    common: dict[str, Any] = {
        "private": options.ma_private_len,
        "output": options.ma_output_len,
        "groups": options.ma_groups,
        "length_ratio": options.ma_length_ratio,
        "popularity": options.ma_popularity,
        "zipf_alpha": options.ma_zipf_alpha,
        "roles": options.ma_roles,
        "role": options.ma_role_len,
        "fanout": tuple(options.ma_fanout),
        "rounds": options.ma_rounds,
        "vocab": options.ma_vocab,
        "seed": options.seed,
    }
    return [
        MultiAgent(shape=shape, agents=agents, prefix=prefix, **common)
        for shape in options.ma_shape or [_SPEC.shape]
        for prefix in options.ma_prefix_len or [_SPEC.prefix]
        for agents in options.ma_agents or [_SPEC.agents]
    ]


class _PointParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise GraniKVError(f"--point: {message}; it takes --ma flags in one string")


def words_of(options: argparse.Namespace, name: str) -> tuple[str, ...]:
    """The arguments in a flag that holds several in one string, as ``--args-both``."""
    return tuple(_words(f"--{name.replace('_', '-')}", getattr(options, name)))


def variants_of(options: argparse.Namespace) -> list[tuple[str, tuple[str, ...]]]:
    """``(name, arguments)`` of every ``--variant``."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for text in options.variant:
        name, equals, args = text.partition("=")
        if not equals or not name.replace("-", "").replace("_", "").isalnum():
            raise GraniKVError(f"--variant {text!r} is not NAME=ARGS")
        if name in ("stock", "granikv", *(other for other, _ in found)):
            raise GraniKVError(f"--variant {name}: this name is taken; choose another")
        found.append((name, tuple(_words("--variant", args))))
    return found


def _words(flag: str, text: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise GraniKVError(f"{flag} {text!r} cannot be split into arguments: {error}") from error


def check(options: argparse.Namespace) -> None:
    """What must hold between flags, said before anything starts. Raises GraniKVError."""
    ours = options.dataset_name in (MULTI_AGENT, TRACE)
    if not ours and options.compare is None:
        if options.report is not None:
            raise GraniKVError("--report needs --compare, or --dataset-name multi-agent or trace")
        return
    if options.backend not in ("sglang", "sglang-native"):
        raise GraniKVError(f"--backend {options.backend} sees no token ids: --compare and our datasets need sglang")
    if options.repetitions < 1:
        raise GraniKVError(f"--repetitions must be at least 1, got {options.repetitions}")
    if options.stream_interval < 1:
        raise GraniKVError(f"--stream-interval must be at least 1, got {options.stream_interval}")
    if options.dataset_name == TRACE and not options.dataset_path:
        raise GraniKVError("--dataset-name trace needs --dataset-path, a local file in Mooncake's format")
    if options.dataset_name != MULTI_AGENT and options.prefix_state == "warm":
        raise GraniKVError("--prefix-state warm needs --dataset-name multi-agent: others do not say what is shared")
    if options.dataset_name != MULTI_AGENT and options.point:
        raise GraniKVError("--point needs --dataset-name multi-agent")
    if options.compare is not None:
        _check_comparison(options)
    elif options.variant or options.one_at_a_time:
        raise GraniKVError("--variant and --one-at-a-time need --compare stock")


def _check_comparison(options: argparse.Namespace) -> None:
    if options.repetitions < LEAST_REPETITIONS:
        raise GraniKVError(f"--compare needs --repetitions of at least {LEAST_REPETITIONS}, got {options.repetitions}")
    if options.temperature != 0:
        raise GraniKVError("--compare needs --temperature 0: sampled outputs cannot be compared")
    if options.compare == "stock":
        if options.base_url is not None or options.port is not None:
            raise GraniKVError(
                "--compare stock starts both servers itself; drop --base-url and --port, or compare a URL"
            )
        return
    if not options.compare.startswith(("http://", "https://")):
        raise GraniKVError(f"--compare {options.compare} is neither stock nor the URL of a server (http://host:port)")
    if options.variant or options.one_at_a_time or options.args_both or options.args_granikv or options.args_stock:
        raise GraniKVError(
            "--compare URL starts no server: --variant, --one-at-a-time and --args-* need --compare stock"
        )
