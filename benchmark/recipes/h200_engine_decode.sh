#!/usr/bin/env bash
# README's H200 rows: time of a decode step without HTTP, 16, 64 and 128 requests on 16K, 8 x 16, nothing shared.
. "$(dirname "$0")/h200.inc"
exec "$python" benchmark/engine_decode.py --model "$model" --stock flashinfer --points 4x16K 16x16K 64x16K 128x16K hetero none \
    --out "$out/engine_decode.jsonl" "$@"
