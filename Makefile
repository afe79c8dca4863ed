# `make quickstart` and `make test` set up all they need on a bare machine with Python 3.11 or newer.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST := --dist loadfile --no-loadscope-reorder --ignore tests/gpu
# Each worker imports all files that it is given, so the workers of `make test-vital` get no others.
VITAL  := $(shell grep -rl --include='test_*.py' 'mark.vital' tests)
# Slow tests wait for the processes that they start, so two of them share a core.
SLOW   ?= $(shell $(PYTHON) -c 'import os; print(2 * (os.cpu_count() or 1))')
# Property tests try the same examples in each run; `make test-all` searches for others from this seed, which it prints.
SEED   ?= $(shell $(PYTHON) -c 'import secrets; print(secrets.randbits(32))')
RANDOM := --hypothesis-profile=random --hypothesis-seed
# Constrains also the pip that installs and the packages that build, so a machine gets today what it gets in a year. PyPI's build of
# torch brings gigabytes of CUDA libraries; pip prefers a CPU build of the same version where it finds one, as in PyTorch's own index:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make quickstart
LOCK   := requirements.lock

# A hundred processes of the tests, and each worker, import the same files: Python keeps them compiled, whatever the caller's
# environment says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup lock quickstart test test-vital test-all test-newest test-oldest check lint audit format clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## Make .venv with fxtune and the tools for developing it

$(VENV)/.ready: pyproject.toml $(LOCK)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(LOCK) --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint $(LOCK) --build-constraint $(LOCK) --editable '.[dev]'
	touch $@

# Each package has the same version on every Python; the marker that says so is cut from each line.
lock:  ## Write requirements.lock: the newest versions that pyproject.toml allows, from the metadata of PyPI
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv
	.venv-lock/bin/uv pip compile --quiet --upgrade --universal --fork-strategy fewest --python-version 3.11 \
	  --extra flash --extra quant --extra tensorboard --extra dev \
	  --annotation-style line --custom-compile-command 'make lock' --output-file $(LOCK) pyproject.toml >/dev/null
	sed -i "s/ ; python_full_version < '3.14' and sys_platform == 'linux' / /" $(LOCK)

quickstart: setup  ## Fine-tune the built-in tiny Llama on a chat dataset, half a minute on two CPU cores
	$(BIN)/python -m fxtune +recipe=quickstart

test: setup  ## Run the tests that need no GPU and at most a few seconds each
	$(BIN)/python -m pytest -n auto $(PYTEST) -m 'not slow'

test-vital: setup  ## Run the slow tests of what must always hold; CI runs them after `make test`
	$(BIN)/python -m pytest -n $(SLOW) $(PYTEST) -m vital $(VITAL)

test-all: test  ## Run all tests that need no GPU: `make test`, slow ones, other examples (SEED=...), then `make test-oldest`
	$(BIN)/python -m pytest -n $(SLOW) $(PYTEST) -m 'slow or hypothesis' $(RANDOM)=$(SEED)
	$(BIN)/python scripts/other_versions.py oldest

test-newest: setup  ## Try the newest versions of all packages (5 GB): what moved, which tests fail; gates nothing
	$(BIN)/python scripts/other_versions.py newest

test-oldest: setup  ## Run the tests with the oldest versions that pyproject.toml allows (3 GB)
	$(BIN)/python scripts/other_versions.py oldest

check: lint audit  ## Lint, type-check and audit

lint: setup  ## Lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit: setup  ## Look for known vulnerabilities in the installed packages; says so if the database cannot be reached
	$(BIN)/python scripts/audit.py

format: setup  ## Format the code and fix what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the virtual environment and caches (runs/ stays)
	rm -rf $(VENV) .venv-lock .venv-newest .venv-oldest .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
