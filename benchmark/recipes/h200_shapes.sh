#!/usr/bin/env bash
# Every shape but the grid in one run of the servers: heterogeneous 8 x 16, forest, straggler, fanout, none, rounds, and
# the homogeneous point with as many requests to hold them against.
. "$(dirname "$0")/h200.inc"
compare shapes --ma-shape homogeneous --ma-prefix-len 16384 --ma-agents 128 \
    --point "--ma-shape heterogeneous --ma-groups 8 --ma-length-ratio 8 --ma-prefix-len 16384 --ma-agents 128" \
    --point "--ma-shape forest --ma-prefix-len 8192 --ma-roles 4 --ma-role-len 2048 --ma-agents 128" \
    --point "--ma-shape straggler --ma-prefix-len 16384 --ma-agents 64" \
    --point "--ma-shape fanout --ma-prefix-len 4096 --ma-agents 30" \
    --point "--ma-shape none --ma-prefix-len 1024 --ma-agents 64" \
    --point "--ma-shape rounds --ma-prefix-len 4096 --ma-agents 32 --ma-rounds 3" "$@"
