#!/usr/bin/env bash
# 8 prefixes of 2K to 16K tokens, all distinct, 16 requests each; and as zipf, where few prefixes have most requests.
. "$(dirname "$0")/h200.inc"
compare heterogeneous --ma-shape heterogeneous --ma-groups 8 --ma-length-ratio 8 --ma-prefix-len 16384 --ma-agents 128 \
    --ma-popularity uniform "$@"
compare heterogeneous_zipf --ma-shape heterogeneous --ma-groups 8 --ma-length-ratio 8 --ma-prefix-len 16384 \
    --ma-agents 128 --ma-popularity zipf "$@"
