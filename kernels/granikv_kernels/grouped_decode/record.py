"""Record of grouped decode: the shapes that its tests, its benchmark and its docs share."""

from __future__ import annotations

from granikv_kernels.record import DecodeCase, OpRecord

K = 1024


def _one(tokens: int, requests: int, tail: int = 256) -> DecodeCase:
    return DecodeCase(
        f"{tokens // K}K x {requests}", 32, 8, 128, ((tokens, tuple(range(requests))),), (tail,) * requests
    )


def _groups(name: str, lengths: tuple[int, ...], members: int, tail: int = 256) -> DecodeCase:
    items = tuple((n, tuple(range(i * members, (i + 1) * members))) for i, n in enumerate(lengths))
    return DecodeCase(name, 32, 8, 128, items, (tail,) * (len(lengths) * members))


def _small(name: str, q: int, kv: int, d: int, dtype: str) -> DecodeCase:
    """A forest: a root that five rows share, a branch under it, one with one member, empty items, two bare rows."""
    items = ((203, (0, 1, 2, 3, 5)), (77, (1, 2)), (65, (4,)), (0, (6,)), (64, ()))
    return DecodeCase(name, q, kv, d, items, (30, 23, 1, 65, 128, 0, 70, 0), dtype)


RECORD = OpRecord(
    name="grouped_decode",
    summary="Decode attention of one layer: every shared prefix read once for all members, tails read by slot.",
    tests=(
        _small("gqa 1", 4, 4, 64, "float32"),
        _small("gqa 3", 9, 3, 64, "bfloat16"),
        _small("gqa 4", 8, 2, 128, "bfloat16"),
        _small("gqa 5", 10, 2, 64, "float16"),
        _small("gqa 8", 8, 1, 128, "float16"),
        DecodeCase("no items", 8, 2, 64, (), (130, 1, 64, 33), "float16"),
        DecodeCase("one row", 4, 1, 64, ((31, (0,)),), (1,), "float32"),
        DecodeCase("no tails", 4, 2, 64, ((129, (0, 1, 2)),), (0, 0, 0), "float32"),
    ),
    bench=(
        _one(16 * K, 4),
        _one(16 * K, 16),
        _one(16 * K, 32),
        _one(16 * K, 64),
        _one(16 * K, 128),
        _groups("4 groups x 16", (16 * K, 12 * K, 8 * K, 4 * K), 16),
        _groups("8 groups x 8", tuple(2 * K * (i + 1) for i in range(8)), 8),
    ),
)
