#!/usr/bin/env bash
# 32 agents on a 4K prefix read what all have said, in 3 turns.
. "$(dirname "$0")/h200.inc"
compare rounds --ma-shape rounds --ma-prefix-len 4096 --ma-agents 32 --ma-rounds 3 "$@"
