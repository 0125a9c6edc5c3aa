# `make help` lists the targets. Everything happens in .venv; nothing outside this folder is changed.

PYTHON ?= python3.11
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-for-evertrain
CODE   := src tests benchmarks examples tools
PYTEST := $(BIN)/python -m pytest
# tests of real processes on a shared machine may lose a race with its other users: each failure is tried once more, and
# the summary names every test for which that was needed (R)
AGAIN  := --reruns 1 -rR

.DEFAULT_GOAL := help
.PHONY: help install demo lint types unit system test test-nccl test-all clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP) ## .venv with all that examples, tests and benchmarks need

# torch first and by itself: it is by far the largest part, and a failure there should say so
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: install ## trains a GPT on 4 ranks through a kill, a hang and an eviction, compares the result bit for bit
	$(BIN)/python examples/demo.py

lint: install ## ruff: rules and format; import-linter: who may import whom
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/lint-imports

types: install ## mypy, strict
	$(BIN)/mypy

unit: install ## tests without a real job
	$(PYTEST) tests --ignore tests/system -m 'not matrix' $(AGAIN) -n auto --maxprocesses 4

system: install ## tests that start real jobs; a sample of each matrix
	$(PYTEST) tests/system -m 'not matrix' $(AGAIN)

test-nccl: install ## the NCCL plugin: a driver that plays NCCL, every trap, valgrind and ThreadSanitizer where they are
	$(PYTEST) tests/trace/test_nccl_*.py tests/agent/test_nccl_trace.py tests/locate/test_nccl_heads.py $(AGAIN)

test: lint types unit system ## all of the above: what must hold before a change lands

test-all: export EVERTRAIN_TEST_ALL = 1
test-all: lint types ## the same with the whole matrices, and all examples of every property
	$(PYTEST) tests --ignore tests/system -n auto --maxprocesses 4
	$(PYTEST) tests/system

clean: ## removes .venv, caches and run directories
	rm -rf $(VENV) .evertrain .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
