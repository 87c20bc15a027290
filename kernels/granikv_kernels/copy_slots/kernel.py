"""Triton kernel of the promotion copy: rows of many buffers in one launch, through a table of their addresses."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def copy_kernel(
    table_ptr, source_ptr, destination_ptr, count, ROW_WORDS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Program ``(t, b)`` copies ``BLOCK_T`` rows of ``ROW_WORDS`` 4-byte words within buffer ``b``."""
    # Tokens vary fastest: programs that run together read and write one buffer, and a contiguous destination streams.
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    word = tl.arange(0, BLOCK_W)
    base = tl.load(table_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    base = tl.multiple_of(base, 16)
    live = token < count
    source = tl.load(source_ptr + token, mask=live, other=0).to(tl.int64)
    destination = tl.load(destination_ptr + token, mask=live, other=0).to(tl.int64)
    mask = live[:, None] & (word < ROW_WORDS)[None, :]
    rows = tl.load(base + source[:, None] * ROW_WORDS + word[None, :], mask=mask)
    tl.store(base + destination[:, None] * ROW_WORDS + word[None, :], rows, mask=mask)
