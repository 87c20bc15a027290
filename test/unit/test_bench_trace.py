"""Mooncake traces: a 512-token block is 512 tokens, equal hashes are equal tokens, broken lines are named."""

from __future__ import annotations

import json

import pytest

from granikv_sglang.bench_serving import trace
from granikv_sglang.core import GraniKVError

GOOD = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 0, "input_length": 1024, "output_length": 7, "hash_ids": [1, 2]},
    {"timestamp": 1500, "input_length": 600, "output_length": 9, "hash_ids": [1, 9]},
]


def write(tmp_path, lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def asks_of(path, repetition=0, **values):
    read = trace.read(path, limit=100, **values)
    return trace.workload(read, seed=1, repetition=repetition, vocab=30000).turns[0]({})


def test_a_block_is_exactly_512_tokens(tmp_path):
    first, second, third = asks_of(write(tmp_path, GOOD))
    assert [first.prompt_len, second.prompt_len, third.prompt_len] == [1024, 1100, 600]
    assert all(len(ask.prompt) == ask.prompt_len for ask in (first, second, third))
    assert second.prompt[:1024] == first.prompt
    assert third.prompt[:512] == first.prompt[:512]
    assert third.prompt[512:] != first.prompt[512:600]
    assert [first.output_len, second.output_len, third.output_len] == [7, 5, 9]


def test_arrivals_are_those_of_the_trace_in_order(tmp_path):
    assert [ask.at_ms for ask in asks_of(write(tmp_path, GOOD))] == [0, 1000, 1500]


def test_shared_blocks_stay_and_private_ones_are_fresh(tmp_path):
    path = write(tmp_path, GOOD)
    (one, two, three), (one_, two_, three_) = asks_of(path, 0), asks_of(path, 1)
    assert one.prompt == one_.prompt  # both of its blocks are shared
    assert two.prompt[:1024] == two_.prompt[:1024]
    assert two.prompt[1024:] != two_.prompt[1024:]
    assert three.prompt[512:] != three_.prompt[512:]
    assert asks_of(path, 0) == asks_of(path, 0)


def test_another_block_size_is_honoured(tmp_path):
    path = write(tmp_path, [{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}] * 2)
    a, b = asks_of(path, block_size=16)
    assert a.prompt == b.prompt
    assert a.prompt_len == 40
    with pytest.raises(GraniKVError, match="--trace-block-size"):
        asks_of(path)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ({**GOOD[0], "input_length": 0}, "input_length"),
        ({**GOOD[0], "output_length": "many"}, "output_length"),
        ({**GOOD[0], "timestamp": -1}, "timestamp"),
        ({**GOOD[0], "timestamp": float("nan")}, "timestamp"),
        ({**GOOD[0], "hash_ids": "1 2 3"}, "hash_ids"),
        ({**GOOD[0], "hash_ids": [1, True, 2]}, "hash_ids"),
        ({**GOOD[0], "hash_ids": [1, 2]}, "3 blocks of 512"),
    ],
    ids=str,
)
def test_a_broken_line_is_named_or_left_out(tmp_path, line, why):
    path = write(tmp_path, [GOOD[0], "", line, GOOD[1]])
    with pytest.raises(GraniKVError, match="line 3") as refused:
        trace.read(path, limit=10)
    assert why in str(refused.value)
    assert "--trace-skip-broken" in str(refused.value)
    read = trace.read(path, limit=10, skip_broken=True)
    assert len(read.records) == 2
    assert [number for number, _ in read.skipped] == [3]


def test_a_limit_does_not_read_further(tmp_path):
    assert len(trace.read(write(tmp_path, [*GOOD, "{"]), limit=3).records) == 3


def test_files_that_are_no_trace(tmp_path):
    with pytest.raises(GraniKVError, match="--dataset-path"):
        trace.read(tmp_path / "nothing", limit=1)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraniKVError, match="--dataset-path"):
        trace.read(tmp_path / "binary", limit=1)
    with pytest.raises(GraniKVError, match="no usable request"):
        trace.read(write(tmp_path, ["{"]), limit=1, skip_broken=True)
