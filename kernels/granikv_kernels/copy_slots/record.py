"""Record of the promotion copy."""

from __future__ import annotations

from granikv_kernels.record import CopyCase, OpRecord

RECORD = OpRecord(
    name="copy_slots",
    summary="Promotion copy: rows of every layer's K and V buffer gathered into an extent, one launch.",
    tests=(
        CopyCase("odd count", layers=2, slots=64, kv_heads=3, head_dim=64, tokens=13),
        CopyCase("scattered", layers=1, slots=300, kv_heads=8, head_dim=128, tokens=101, contiguous=False),
        CopyCase("float32", layers=3, slots=40, kv_heads=1, head_dim=64, tokens=1, dtype="float32"),
    ),
    bench=(
        CopyCase("8B, 16K tokens", layers=32, slots=40960, kv_heads=8, head_dim=128, tokens=16384),
        CopyCase("8B, 2K tokens", layers=32, slots=40960, kv_heads=8, head_dim=128, tokens=2048),
        CopyCase("8B, 16K scattered", layers=32, slots=40960, kv_heads=8, head_dim=128, tokens=16384, contiguous=False),
    ),
)
