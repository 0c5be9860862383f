PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint sweep browser bench clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.ready ## train a small GPT with the mixprec backend
	$(BIN)/python examples/train_gpt.py --quick

test: .venv/.ready ## run the tests, without those marked slow, two files at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: .venv/.ready ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

sweep: .venv/.ready ## run the tests marked slow
	$(BIN)/python -m pytest -q -m slow

browser: .venv/.ready ## run the tests that need chromium and chromedriver
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m browser

bench: .venv/.ready ## run the benchmarks
	$(BIN)/python -m benchmarks

clean: ## remove build products, caches and out/ (keeps .venv)
	rm -rf build dist out *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

.venv/.ready: requirements-dev.txt pyproject.toml
	@echo "Setting up .venv (a few minutes the first time)"
	$(PYTHON) -m venv .venv
	$(PIP) install -r requirements-dev.txt
	$(PIP) install --no-deps -e .
	touch $@
