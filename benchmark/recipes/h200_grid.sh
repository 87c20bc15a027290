#!/usr/bin/env bash
# One shared prefix of 1K to 32K tokens x 16, 64 and 128 requests at once. About 10 minutes: where a command may last no
# longer, run it in parts: PREFIXES="1024 4096 8192" and PREFIXES="16384 32768", or with servers that stay up.
. "$(dirname "$0")/h200.inc"
compare "grid${PART:+_$PART}" --ma-shape homogeneous --ma-prefix-len ${PREFIXES:-1024 4096 8192 16384 32768} --ma-agents 16 64 128 "$@"
