#!/usr/bin/env bash
# README's CPU row: decode tokens/s of 16 requests on one 2K prefix, and of 8 with nothing shared.
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" benchmark/bench_cpu.py --requests 16 --shared 2048 "$@"
