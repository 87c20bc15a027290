#!/usr/bin/env bash
# The control: 64 requests of 1K tokens that share nothing. GraniKV must cost nothing.
. "$(dirname "$0")/h200.inc"
compare none --ma-shape none --ma-prefix-len 1024 --ma-agents 64 "$@"
