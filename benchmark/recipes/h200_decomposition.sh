#!/usr/bin/env bash
# What each part adds, at 64 requests on 16K and on 8 prefixes of 2K to 16K: (a) stock; (c) multi-group cascade over HOT;
# (d) the grouped kernel over HOT; then the whole of GraniKV, prefill included, and the batch-global peer, which shares
# only what the whole batch has in common and so collapses when prompts are heterogeneous. Three servers at a time.
# (b), multi-group cascade over the ordinary paged pool without HOT, needs a switch that does not exist yet: give its
# arguments in PAGED_ARGS when it does, and it is measured in a third run.
. "$(dirname "$0")/h200.inc"
pool="${POOL:-125000}"
points=(--ma-shape homogeneous --ma-prefix-len 16384 --ma-agents 64
    --point "--ma-shape heterogeneous --ma-groups 8 --ma-length-ratio 8 --ma-prefix-len 16384 --ma-agents 128")

# parts NAME GRANIKV_ARGS VARIANT...: stock, the server called granikv, and one variant of it.
parts() {
    local name="$1"
    granikv_memory="--mem-fraction-static 0.85 $2"
    shift 2
    compare "decomposition_$name" "${points[@]}" "$@"
}

parts hot "--granikv-prefill stock --granikv-regime batched_gemm" --variant "cascade-hot=--granikv-regime cascade"
parts peer "" --variant "batch-global=--granikv-sharing batch --granikv-regime cascade --granikv-prefill stock"
if [ -n "${PAGED_ARGS:-}" ]; then
    parts paged "--granikv-prefill stock --granikv-regime cascade" --variant "cascade-paged=$PAGED_ARGS"
fi
