#!/usr/bin/env bash
# 63 requests on one 16K prefix and one outsider with as long a prompt of its own.
. "$(dirname "$0")/h200.inc"
compare straggler --ma-shape straggler --ma-prefix-len 16384 --ma-agents 64 "$@"
