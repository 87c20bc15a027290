"""Local traces in Mooncake's format: one JSON object a line, prompts given as hash ids of fixed-size token blocks.

A block is exactly ``block_size`` token ids (512 in the published traces); the last block of a prompt is cut so that the
prompt has ``input_length`` tokens. Equal hash ids give equal tokens. A hash id that occurs in one request only is that
request's private part and is drawn afresh in every repetition.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from granikv_sglang.bench_serving.workload import FIRST_ID, STRETCH_HEADS, Ask, Tokens, Workload, generator, one_turn
from granikv_sglang.core import GraniKVError

BLOCK = 512


@dataclass(frozen=True, slots=True)
class Record:
    """One line: arrival in milliseconds, prompt and output length in tokens, hash ids of the prompt's blocks."""

    at_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Records in order of arrival, and the broken lines that were left out, as ``(line number, why)``."""

    path: Path
    block_size: int
    records: tuple[Record, ...]
    skipped: tuple[tuple[int, str], ...]


def read(path: Path, *, limit: int, block_size: int = BLOCK, skip_broken: bool = False) -> Trace:
    """The first ``limit`` requests of a trace file.

    Raises GraniKVError when the file cannot be read or is empty, and at the first broken line unless ``skip_broken``.
    """
    if block_size < 1:
        raise GraniKVError(f"--trace-block-size must be at least 1, got {block_size}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GraniKVError(f"--dataset-path {path} cannot be read as a trace: {_why(error)}") from error
    records: list[Record] = []
    skipped: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(records) == limit:
            break
        try:
            records.append(parse(line, block_size))
        except ValueError as error:
            if not skip_broken:
                raise GraniKVError(
                    f"--dataset-path {path}, line {number} is broken: {error}; mend it, or add --trace-skip-broken"
                ) from error
            skipped.append((number, str(error)))
    if not records:
        raise GraniKVError(f"--dataset-path {path} holds no usable request ({len(skipped)} broken lines)")
    return Trace(path, block_size, tuple(sorted(records, key=lambda record: record.at_ms)), tuple(skipped))


def parse(line: str, block_size: int) -> Record:
    """One line of a trace. Raises ValueError saying what is wrong with it."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    at_ms, hash_ids = value.get("timestamp", 0), value.get("hash_ids")
    if isinstance(at_ms, bool) or not isinstance(at_ms, (int, float)) or not 0 <= at_ms < float("inf"):
        raise ValueError(f"timestamp {at_ms!r} is not milliseconds from the start")
    lengths: dict[str, int] = {}
    for name in ("input_length", "output_length"):
        length = value.get(name)
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"{name} {length!r} is not a positive whole number")
        lengths[name] = length
    if not isinstance(hash_ids, list) or not all(_whole(h) for h in hash_ids):
        raise ValueError("hash_ids is not a list of whole numbers")
    wanted = -(-lengths["input_length"] // block_size)
    if len(hash_ids) != wanted:
        raise ValueError(
            f"{lengths['input_length']} tokens are {wanted} blocks of {block_size}, but there are {len(hash_ids)} "
            "hash_ids (see --trace-block-size)"
        )
    return Record(float(at_ms), lengths["input_length"], lengths["output_length"], tuple(hash_ids))


def workload(trace: Trace, seed: int, repetition: int, vocab: int) -> Workload:
    """The trace as requests with exact token ids and arrival times."""
    used = Counter(h for record in trace.records for h in set(record.hash_ids))
    cache: dict[int, Tokens] = {}

    def block(hash_id: int) -> Tokens:
        if hash_id not in cache:
            own = () if used[hash_id] > 1 else ("repetition", repetition)
            rng = generator(seed, "block", hash_id, *own)
            cache[hash_id] = tuple(rng.integers(FIRST_ID + STRETCH_HEADS, vocab, size=trace.block_size).tolist())
        return cache[hash_id]

    asks = []
    for number, record in enumerate(trace.records):
        tokens = [token for hash_id in record.hash_ids for token in block(hash_id)][: record.input_length]
        group = f"block{record.hash_ids[0]}" if used[record.hash_ids[0]] > 1 else "alone"
        at = record.at_ms - trace.records[0].at_ms
        asks.append(Ask(f"trace-{number}", group, tuple(tokens), len(tokens), record.output_length, at))
    return Workload((), one_turn(asks), tuple(_summary(trace.records, used, trace.block_size)))


def _summary(records: Sequence[Record], used: Counter[int], block_size: int) -> list[dict[str, Any]]:
    shared = sum(min(block_size * sum(used[h] > 1 for h in r.hash_ids), r.input_length) for r in records)
    return [{"group": "trace", "shared_tokens": shared, "members": len(records), "blocks": len(used)}]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _why(error: BaseException) -> str:
    return str(error).splitlines()[0]
