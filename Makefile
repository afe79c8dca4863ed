# `make quickstart` and `make test` set up all they need on a bare machine with Python 3.11 or newer.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# torch goes first: on a machine without an NVIDIA driver the CPU build, where pip's index has one. PyPI's brings gigabytes of CUDA
# libraries; PyTorch's own index has a small one: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make quickstart
TORCH  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')

.PHONY: help setup quickstart test check lint audit format clean

help:  ## Say what each target does
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## Make .venv with fxtune and the tools for developing it

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

quickstart: setup  ## Fine-tune the built-in tiny Llama on a chat dataset, half a minute on two CPU cores
	$(BIN)/python -m fxtune +recipe=quickstart

test: setup  ## Run all tests that need no GPU
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

check: lint audit  ## Lint, type-check and audit

lint: setup  ## Lint and type-check
	$(BIN)/ruff check .
	$(BIN)/mypy

audit: setup  ## Look for known holes in what is installed; says so where their database cannot be reached
	$(BIN)/python scripts/audit.py

format: setup  ## Sort imports and mend what the linter can
	$(BIN)/ruff check --fix .

clean:  ## Remove the virtual environment and caches (runs/ stays)
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
