#!/usr/bin/env bash
# What each part adds, at 64 requests on 16K and on 8 prefixes of 2K to 16K, each against (a) stock in the same run. Prefill
# is the stock backend's in (b) to (d). Three servers at a time, about 3 minutes each; arguments choose of:
#   storage   cascade-paged is (b), multi-group cascade over the ordinary paged pool, HOT off; granikv is (c), + HOT
#   kernel    cascade-hot is (c) again; granikv is (d), + the grouped kernel
#   peer      batch-global shares only what the whole batch has in common, else it is stock: it collapses when prompts are
#             heterogeneous; granikv is all of it, prefill included
. "$(dirname "$0")/h200.inc"
pool="${POOL:-125000}"
points=(--ma-shape homogeneous --ma-prefix-len 16384 --ma-agents 64
    --point "--ma-shape heterogeneous --ma-groups 8 --ma-length-ratio 8 --ma-prefix-len 16384 --ma-agents 128")
own="--granikv-prefill stock --granikv-regime"

# parts NAME GRANIKV_ARGS VARIANT: stock, the server called granikv with GRANIKV_ARGS, and one variant of it.
parts() {
    granikv_memory="--mem-fraction-static 0.85 $2"
    compare "decomposition_$1" "${points[@]}" --variant "$3"
}

if [ $# -eq 0 ]; then set -- storage kernel peer; fi
for part in "$@"; do
    case "$part" in
    storage) parts storage "$own cascade" "cascade-paged=--granikv-hot off" ;;
    kernel) parts kernel "$own batched_gemm" "cascade-hot=$own cascade" ;;
    peer) parts peer "" "batch-global=--granikv-sharing batch --granikv-hot off $own cascade" ;;
    *)
        echo "usage: h200_decomposition.sh [storage] [kernel] [peer]" >&2
        exit 2
        ;;
    esac
done
