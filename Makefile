# Two commands for a fresh machine: `make chat` and `make test`. Both create .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pyproject.toml decides what is installed, so the environment is renewed when it changes
STAMP := $(VENV)/.installed

.PHONY: chat test test-long lint clean

chat: $(STAMP)
	@$(BIN)/swiftlet-mlx chat

test: $(STAMP)
	@$(BIN)/python -m pytest --numprocesses auto --dist worksteal

test-long: $(STAMP)
	@$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "long and not slow"

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy $(filter-out tests/test_%,$(wildcard tests/*.py))

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + \
	  "; run: make PYTHON=python3.12 $(MAKECMDGOALS)" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV) (once, about a minute) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
