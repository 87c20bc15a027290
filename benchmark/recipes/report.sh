#!/usr/bin/env bash
# The page and the plots of results that were measured elsewhere: report.sh FOLDER FILE.jsonl...
set -eu
cd "$(dirname "$0")/../.."
folder="$1"
shift
exec "${PYTHON:-.venv/bin/python}" -m granikv_sglang.bench_serving --report "$folder" --report-from "$@"
