#!/usr/bin/env bash
# What each part adds, at 64 requests on 16K and on 8 prefixes of 2K to 16K. One part a run: (a) stock, GraniKV whole, and
# one variant of it, each against stock in that run. Prefill is the stock backend's in (b) to (d). 3 to 4 minutes a part:
#   paged    (b) multi-group cascade over the ordinary paged pool, HOT off
#   hot      (c) the same with HOT
#   kernel   (d) HOT and the grouped kernel
#   global   the peer: shares only what the whole batch has in common, else it is stock. It collapses when prompts are
#            heterogeneous
# LOADS: "homogeneous" (64 on 16K) or "heterogeneous" (the 8 prefixes) alone; default: both.
. "$(dirname "$0")/h200.inc"
pool="${POOL:-125000}"
# Every run starts servers of its own.
unset STOCK_URL GRANIKV_URL
one="--ma-shape homogeneous --ma-prefix-len 16384 --ma-agents 64"
many="--ma-shape heterogeneous --ma-groups 8 --ma-length-ratio 8 --ma-prefix-len 16384 --ma-agents 128"
case "${LOADS:-both}" in
homogeneous) points=($one) ;;
heterogeneous) points=($many) ;;
both) points=($one --point "$many") ;;
*)
    echo "h200_decomposition.sh: LOADS=$LOADS is neither homogeneous, heterogeneous nor both" >&2
    exit 2
    ;;
esac
own="--granikv-prefill stock --granikv-regime"

if [ $# -eq 0 ]; then set -- paged hot kernel global; fi
for part in "$@"; do
    case "$part" in
    paged) variant="cascade-paged=--granikv-hot off $own cascade" ;;
    hot) variant="cascade-hot=$own cascade" ;;
    kernel) variant="grouped-hot=$own batched_gemm" ;;
    global) variant="batch-global=--granikv-sharing batch --granikv-hot off $own cascade" ;;
    *)
        echo "usage: h200_decomposition.sh [paged] [hot] [kernel] [global]" >&2
        exit 2
        ;;
    esac
    compare "decomposition_$part" "${points[@]}" --variant "$variant"
done
