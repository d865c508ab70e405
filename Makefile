# `make quickstart` trains something in minutes; `make check` is for while you work; `make test` checks what needs no GPU,
# engine environment or long run.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/tqppo-installed
BENCHES := $(patsubst tests/bench/%.py,bench-%,$(filter-out %/harness.py %/__init__.py,$(wildcard tests/bench/*.py)))

# Much of the tests' time is waiting for processes, so that more of them run than there are cores. tests/conftest.py says which
# tests stay together.
WORKERS ?= 3
SIDE_BY_SIDE := --dist loadscope --no-loadscope-reorder --durations=10

export OMP_NUM_THREADS ?= 1

.PHONY: quickstart env check test lint bench engines test-engines test-gpu test-long completions fuzz soak faults env-locked lock audit

quickstart: $(STAMP)
	env -u OMP_NUM_THREADS $(BIN)/tqppo train --preset quickstart

env: $(STAMP)

# The install is editable: it needs doing again only when the requirements change.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV); some minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	touch $@

# What a change should pass before every commit: style, types, and the tests without Ray of the rooms that changed. Under
# a minute; mypy's first run takes a minute more. ROOMS="algorithms queue" tests these rooms, ROOMS=all every one of them:
# 4,400 tests, 5 minutes of CPU time.
CHECKED = $(if $(ROOMS),$(if $(filter all,$(ROOMS)),tests --ignore tests/cli,$(addprefix tests/,$(ROOMS)) tests/test_house.py),\
	$(shell $(BIN)/python tests/changed.py))
check: lint
	$(BIN)/python -m pytest --numprocesses 2 $(SIDE_BY_SIDE) --timeout 60 $(CHECKED) \
		-m "not ray and not slow and not engines and not gpu and not long"

# 5,000 tests in 33 minutes on two cores; most of it are 250 tests that start Ray or train. The slowest ten are printed.
test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) $(SIDE_BY_SIDE) -m "not engines and not gpu and not long"

# What only a GPU can show; any NVIDIA card will do. Nobody has run these yet.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -n 0 -m gpu tests

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

# 10,000 damaged or hostile files of each kind through the functions that read them; about ten minutes.
fuzz: $(STAMP)
	PYTHONPATH=tests HF_HUB_OFFLINE=1 $(BIN)/python -m fuzz

# Memory, descriptors, threads and shared memory of every process over STEPS steps; hours for the default.
STEPS ?= 2000
soak: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m soak --steps $(STEPS)

# Who is killed, stopped or starved × when: a run each, about a minute. FAULTS="--who actor" runs some of them. Cells that
# were right with the program as it is are not run again.
faults: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m faults.matrix --write docs/faults.md $(FAULTS)

# The tested versions, their files checked against the hashes in requirements-locked.txt. For the platform that its first
# line names; elsewhere `make env` installs the same versions without hashes. pip takes no hash for an editable install,
# which therefore comes second and brings nothing with it.
env-locked:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --require-hashes --no-deps --requirement requirements-locked.txt
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --editable .
	touch $(STAMP)

# Trusts the package index once, and writes down the hashes of what it offers for this platform.
lock:
	$(PYTHON) tests/lock.py

# Known vulnerabilities of the tested versions. An index without the data is no failure, unless TQPPO_AUDIT=required.
AUDIT := $(VENV)-audit/bin
audit:
	@test -x $(AUDIT)/pip-audit || { $(PYTHON) -m venv $(VENV)-audit && $(AUDIT)/python -m pip install -qq pip-audit; } || true
	@$(PYTHON) tests/audit.py $(AUDIT)/pip-audit

completions: $(STAMP)
	$(BIN)/tqppo --show-completion bash > completions/tqppo.bash
	$(BIN)/tqppo --show-completion zsh > completions/_tqppo
	$(BIN)/tqppo --show-completion fish > completions/tqppo.fish
