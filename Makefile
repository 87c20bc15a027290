# GraniKV on SGLang. `make` alone lists the targets; each one that needs the environment builds .venv first.
#   ARGS="..."     handed on to the program behind demo, serve, test, test-gpu, bench-cpu and bench-smoke
#   PYTHON=path    the interpreter to build .venv from (3.11 or 3.12; found by itself otherwise)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.granikv-setup
ARGS  ?=
PYTHON ?=

# Exits 0 where the interpreter is one that SGLang 0.5.17's wheels exist for.
PY_OK := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))

.PHONY: help setup demo serve test test-gpu soak browser lint fmt bench-cpu bench-smoke lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## build .venv from requirements.lock (about 3 GB to download)

demo: $(STAMP) ## answer real questions through GraniKV on this machine's CPU
	@$(PY) -m granikv_sglang.demo $(ARGS)

serve: $(STAMP) ## start the OpenAI-compatible server
	@exec $(PY) -m granikv_sglang.launch_server $(ARGS)

test: $(STAMP) ## all tests that need no GPU
	@$(PY) -m pytest -m "not gpu" $(ARGS)

test-gpu: $(STAMP) ## the tests that need an NVIDIA GPU
	@$(PY) -m pytest -m gpu $(ARGS)

browser: ## Chromium, for the tests of the live page (Debian's package, as root; without it they are skipped)
	@if ! command -v chromium > /dev/null; then
	    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } \
	        > /dev/null 2>&1 || true
	    command -v chromium || echo "no Chromium could be installed: the tests that need one will be skipped"
	fi

soak: $(STAMP) ## random load against a strict server for half an hour (SOAK_S=seconds; make test does two minutes)
	@SOAK_S=$${SOAK_S:-1800} $(PY) -m pytest test/integration/test_soak.py -q $(ARGS)

lint: $(STAMP) ## ruff check, ruff format --check, mypy
	@failed=0   # all three speak, whichever fails first
	$(PY) -m ruff check . || failed=1
	$(PY) -m ruff format --check . || failed=1
	$(PY) -m mypy || failed=1
	exit $$failed

fmt: $(STAMP) ## format and mend what ruff can mend
	@$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench-cpu: $(STAMP) ## the CPU benchmark
	@$(PY) benchmark/bench_cpu.py $(ARGS)

bench-smoke: $(STAMP) ## the serving benchmark from end to end, small, on the embedded model, with a report
	@PYTHON="$(abspath $(PY))" $(SHELL) benchmark/recipes/smoke.sh $(ARGS)

# --universal: one file for Python 3.11 and 3.12. No header, no annotations, no index: the file names packages only.
lock: $(PY) ## resolve pyproject.toml again into requirements.lock
	@$(find_uv)
	"$$uv" pip compile --universal --python-version 3.11 --extra dev --extra bench --upgrade --quiet \
	    --no-header --no-annotate --no-emit-index-url --no-emit-find-links pyproject.toml --output-file requirements.lock
	echo "requirements.lock: $$(wc -l < requirements.lock) packages"

clean: ## remove caches and build outputs (not .venv)
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis python/*.egg-info kernels/*.egg-info *.egg-info
	find python kernels test benchmark -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up ----------------------------------------------------------------------------------------------------------

# Sets $$uv. It is run, not only looked up: a pyenv shim may exist for a version that has no uv.
define find_uv
uv=uv
"$$uv" --version > /dev/null 2>&1 || uv=$(VENV)/bin/uv
endef

# Sets $$python to the real interpreter behind the first candidate that works, pyenv shims included.
define find_python
python=
for c in $(or $(PYTHON),python3.12 python3.11 python3 python); do
    if "$$c" -c '$(PY_OK)' > /dev/null 2>&1; then python="$$("$$c" -c 'import sys; print(sys.executable)')"; break; fi
done
if [ -z "$$python" ]; then
    echo "make: no Python 3.11 or 3.12 found; install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1
fi
endef

# uv does not read pip's settings: what pip alone is told of (a mirror, a company's certificates), tell uv too.
# Needs $$python, which has pip.
define follow_pip
pip_setting() { "$$python" -m pip config list 2> /dev/null | sed -n "s/^global\.$$1='\(.*\)'$$/\1/p" | head -n 1 || true; }
if [ -z "$${UV_DEFAULT_INDEX:-}$${UV_INDEX_URL:-}" ]; then
    index="$${PIP_INDEX_URL:-$$(pip_setting index-url)}"
    if [ -n "$$index" ]; then export UV_DEFAULT_INDEX="$$index"; fi
fi
if [ -z "$${SSL_CERT_FILE:-}" ]; then
    cert="$${PIP_CERT:-$$(pip_setting cert)}"
    if [ -n "$$cert" ]; then export SSL_CERT_FILE="$$cert"; fi
fi
endef

# A real prerequisite, not order-only: when the interpreter behind .venv goes away, this link dangles and all is redone.
# Without uv the environment comes from the standard library, and uv goes into it: nothing outside .venv is touched.
# (Debian's Python may lack ensurepip; then the outer pip installs into the bare environment.)
$(PY):
	@$(find_python)
	echo "[1/4] $$("$$python" --version) at $$python: creating $(VENV)"
	if uv --version > /dev/null 2>&1; then
	    uv venv --quiet --clear --python "$$python" $(VENV)
	elif "$$python" -c 'import ensurepip' 2> /dev/null; then
	    "$$python" -m venv --clear $(VENV)
	else
	    "$$python" -m venv --clear --without-pip $(VENV)
	fi

$(STAMP): $(PY) requirements.lock pyproject.toml
	@SECONDS=0
	if ! $(PY) -c '$(PY_OK)'; then
	    echo "make: $(VENV) holds $$($(PY) --version), 3.11 or 3.12 is needed; remove $(VENV) and try again" >&2; exit 1
	fi
	python="$$($(PY) -c 'import sys; print(sys._base_executable)')"
	$(follow_pip)
	$(find_uv)
	if ! "$$uv" --version > /dev/null 2>&1; then
	    echo "[2/4] no uv found: installing it into $(VENV)"
	    pin="$$(grep -oE '^uv==[^ ;]+' requirements.lock)"
	    $(PY) -m pip install --quiet "$$pin" 2> /dev/null || "$$python" -m pip --python $(PY) install --quiet "$$pin"
	fi
	echo "[2/4] installing $$(wc -l < requirements.lock) pinned packages with $$("$$uv" --version) (minutes on a first run)"
	if [ -t 2 ]; then quiet=; else quiet=--quiet; fi
	"$$uv" pip install $$quiet --python $(PY) -r requirements.lock
	echo "[3/4] installing granikv-sglang from this folder ($${SECONDS} s)"
	"$$uv" pip install --quiet --python $(PY) --no-deps --no-build-isolation -e .
	echo "[4/4] compiling bytecode, so that each later start is quick ($${SECONDS} s)"
	# Some packages ship templates that are not valid Python: skipped, no error. Their warnings are not ours to mend.
	$(PY) -W ignore -m compileall -qq -j 0 "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
	touch $(STAMP)
	echo "set-up done in $${SECONDS} s"
