"""One record per op: what it is called, what it computes, and the shapes its tests and its benchmark run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DecodeCase:
    """A batch for grouped decode and its parts.

    Attributes:
        name: as printed in tables.
        q_heads, kv_heads, head_dim, dtype: the layer; dtype by torch's name.
        items: ``(tokens, batch rows)`` of each shared stretch, in the order they lie on a row's path.
        tails: private tokens of each batch row.
    """

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    items: tuple[tuple[int, tuple[int, ...]], ...]
    tails: tuple[int, ...]
    dtype: str = "bfloat16"

    @property
    def rows(self) -> int:
        return len(self.tails)

    @property
    def coverage(self) -> list[int]:
        """Shared tokens of each row."""
        covered = [0] * self.rows
        for tokens, rows in self.items:
            for row in rows:
                covered[row] += tokens
        return covered

    @property
    def bytes_and_operations(self) -> tuple[int, int]:
        """Bytes of K and V when each prefix is read once, and operations of the two products."""
        element = 4 if self.dtype == "float32" else 2
        tokens = sum(t for t, _ in self.items) + sum(self.tails)
        scored = sum(t * len(rows) for t, rows in self.items) + sum(self.tails)
        return 2 * tokens * self.kv_heads * self.head_dim * element, 4 * scored * self.q_heads * self.head_dim


@dataclass(frozen=True)
class CopyCase:
    """A promotion copy: ``layers`` K and V buffers of ``slots`` rows, ``tokens`` rows moved."""

    name: str
    layers: int
    slots: int
    kv_heads: int
    head_dim: int
    tokens: int
    contiguous: bool = True
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class OpRecord:
    """An op with its shapes.

    Attributes:
        name, summary: for tables and docs.
        tests: small and awkward, for the interpreter and the GPU.
        bench: full size, for the GPU.
        bound: largest RMS of the error over the RMS of the reference, by dtype.
    """

    name: str
    summary: str
    tests: tuple[DecodeCase, ...] | tuple[CopyCase, ...]
    bench: tuple[DecodeCase, ...] | tuple[CopyCase, ...]
    bound: dict[str, float] = field(default_factory=lambda: {"bfloat16": 8e-3, "float16": 1e-3, "float32": 5e-6})
