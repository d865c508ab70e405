# `make quickstart` trains something in minutes; `make test` checks what needs no GPU, engine environment or long run.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/tqppo-installed
BENCHES := $(patsubst tests/bench/%.py,bench-%,$(filter-out %/harness.py %/__init__.py,$(wildcard tests/bench/*.py)))

export OMP_NUM_THREADS ?= 1

.PHONY: quickstart env test lint bench engines test-engines test-long completions

quickstart: $(STAMP)
	$(BIN)/tqppo train --preset quickstart

env: $(STAMP)

# The install is editable: it needs doing again only when the requirements change.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV); some minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -m "not engines and not gpu and not long"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(BENCHES)

bench-%: $(STAMP)
	$(BIN)/python tests/bench/$*.py

# A file queue.py would hide Python's own module of that name.
bench-queue: bench-data_plane ;

engines: $(STAMP)
	$(BIN)/tqppo backends install vllm sglang

test-engines: $(STAMP)
	$(BIN)/python -m pytest -m "engines and not faults and not long"

test-long: $(STAMP)
	$(BIN)/python -m pytest -m "long or faults"

completions: $(STAMP)
	$(BIN)/tqppo --show-completion bash > completions/tqppo.bash
	$(BIN)/tqppo --show-completion zsh > completions/_tqppo
	$(BIN)/tqppo --show-completion fish > completions/tqppo.fish
