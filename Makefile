# latentmill: `make` shows what there is to do.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= a red circle moving right on a blue background
TESTS ?= tests
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# One resolution, so that the pins hold for every package. Installed anew whenever a pin or a dependency changes.
$(VENV)/.installed: pyproject.toml client/pyproject.toml constraints.txt
	@echo 'installing into $(VENV) (a few minutes the first time)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		echo 'setup: Python 3.11 with its venv module is needed (Debian: apt install python3.11-venv)' >&2; exit 1; }
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable client
	@touch $@

setup: $(VENV)/.installed ## Install everything into .venv

demo: setup ## Make a video from PROMPT and show it (KEEP=1 leaves the stack running)
	@$(BIN)/python -m infra.local.demo $(if $(KEEP),--keep) "$(PROMPT)"

up: setup ## Start the stack in the background and show its address and key
	@$(BIN)/python -m infra.local up

down: ## Stop the stack
	@test ! -x $(BIN)/python || $(BIN)/python -m infra.local down

test: setup ## Run every test against a stack of its own (TESTS=tests/unit for a part)
	$(BIN)/python -m pytest $(TESTS)

test-docker: setup ## Run the integration tests on servers in containers
	@$(BIN)/python -m tests.integration.engine
	LATENTMILL_TEST_SERVERS=containers $(BIN)/python -m pytest tests/integration

test-compose: setup ## Build the images and test the whole compose stack, faults and a burst included
	@$(BIN)/python -m pytest tests/compose

docs: setup ## Fill in what the documentation takes from the code
	$(BIN)/python -m docs.generate

check: setup ## Lint, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Let the formatter and the linter mend what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: help setup demo up down test test-docker test-compose docs check format
