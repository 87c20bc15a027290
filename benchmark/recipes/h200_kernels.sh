#!/usr/bin/env bash
# docs/log.md's kernel rows: one decode-attention layer, and the promotion copy.
. "$(dirname "$0")/h200.inc"
"$python" benchmark/kernel_decode.py "$@"
"$python" benchmark/kernel_copy.py "$@"
