#!/usr/bin/env bash
# A team prompt of 8K tokens, below it 4 role prompts of 2K, 32 requests below each.
. "$(dirname "$0")/h200.inc"
compare forest --ma-shape forest --ma-prefix-len 8192 --ma-roles 4 --ma-role-len 2048 --ma-agents 128 "$@"
