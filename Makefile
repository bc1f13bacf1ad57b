# One verb each; `make help` lists them. Every verb sets up what it needs, inside the
# checkout, and returns at once when that is done already.

SHELL := /bin/bash
PY := .venv/bin/python
# Workers for the tests.
JOBS ?= 2

# Small matrices gain nothing from threads and lose much when workers share the cores.
export OMP_NUM_THREADS := 1
# Caches stay in the checkout.
export XDG_CACHE_HOME := $(CURDIR)/.data/cache
export HF_HOME := $(CURDIR)/.data/cache/huggingface
export TRITON_CACHE_DIR := $(CURDIR)/.data/cache/triton
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu fuzz mutants mutation lint types counts format build clean

help:  ## list the verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## make .venv with everything that tests and linters need
	@python3 scripts/setup_env.py dev

demo:  ## set up, then run the demonstration
	@python3 scripts/setup_env.py run
	$(PY) -m lockstep demo

test: setup  ## set up, then run every test that needs no GPU
	$(PY) -m pytest -n $(JOBS)

test-gpu:  ## run the GPU tests and mutants with the python3 found; installs nothing
	scripts/gpu_check.sh build/gpu "" gpu card packages mutants

fuzz: setup  ## run the property tests for a long time
	HYPOTHESIS_PROFILE=fuzz $(PY) -m pytest -n $(JOBS) -m "hypothesis and not gpu"

mutants: setup  ## apply each known fault and see its test fail
	$(PY) scripts/mutants.py --jobs $(JOBS)

mutation: setup  ## change the bookkeeping in every small way, see what no test notices
	OMP_NUM_THREADS=1 $(PY) scripts/mutation.py --jobs $(JOBS)

lint: setup  ## style, format, import contracts
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	.venv/bin/lint-imports

types:  ## type check
	@python3 scripts/setup_env.py types
	$(PY) -m pyright --pythonpath $(PY)

counts: setup  ## count lines and hold them to their limits
	$(PY) scripts/counts.py --check

format: setup  ## apply style and format
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

build: setup  ## build the wheel and the source archive into dist/
	$(PY) -m build --no-isolation

clean:  ## remove caches and build output, not the environment nor packages put there
	rm -rf .data/cache dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	[ ! -d build ] || find build -mindepth 1 -maxdepth 1 ! -name packages -exec rm -r {} +
