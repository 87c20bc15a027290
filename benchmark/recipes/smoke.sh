#!/usr/bin/env bash
# The whole path of the serving benchmark, small, on the embedded model on this machine's CPU: a grid, two prefixes of
# distinct lengths, a control that shares nothing, A B A B, the gates, the report. Under 8 minutes on two cores.
# It shows that everything works. Its numbers are no results: two servers and the client share the cores.
set -eu
cd "$(dirname "$0")/../.."
out="${SMOKE_DIR:-build/bench-smoke}"
rm -rf "$out"
# One thread for each server: with more, an idle one's and the client's work stalls every small parallel region.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-.venv/bin/python}" -m granikv_sglang.bench_serving --dataset-name multi-agent --compare stock \
    --ma-shape homogeneous --ma-prefix-len 96 256 --ma-agents 2 5 --ma-private-len 16 --ma-output-len 12 \
    --point "--ma-shape heterogeneous --ma-groups 2 --ma-length-ratio 2 --ma-prefix-len 256 --ma-agents 5" \
    --point "--ma-shape none --ma-prefix-len 64 --ma-agents 5" \
    --args-both "--dtype float32 --max-total-tokens 16384" --args-granikv "--granikv-min-tokens 64" \
    --warmup-requests 0 --report "$out" "$@"
