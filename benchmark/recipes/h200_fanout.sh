#!/usr/bin/env bash
# Small groups, of 2 and 4 requests, each with a 4K prefix of its own: 30 requests in all.
. "$(dirname "$0")/h200.inc"
compare fanout --ma-shape fanout --ma-prefix-len 4096 --ma-agents 30 "$@"
