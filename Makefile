# Everything a newcomer needs: `make run` and `make test`. Both set up `.venv` first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PRESET ?= digits
METHOD ?= aedfl

.DEFAULT_GOAL := help
.PHONY: help install run test test-slow lint clean

help: ## Show what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(STAMP) ## Create .venv and install the package with everything pinned in constraints.txt

# torch goes first and by exact version: a looser request may pull gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

run: $(STAMP) ## Simulate AEDFL on the default preset; prints a table and writes runs/…/report.html
	$(BIN)/aedfl run $(PRESET) --method $(METHOD)

lint: $(STAMP) ## Lint and check types
	$(BIN)/ruff check src tests
	$(BIN)/mypy

# One thread per worker: the workers already use every core.
test: lint ## Lint, types, and all tests but the slow ones
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

test-slow: $(STAMP) ## The slow tests as well
	$(BIN)/pytest -m "not gpu"

clean: ## Remove caches and build leftovers; runs/ stays
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis $(STAMP)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
