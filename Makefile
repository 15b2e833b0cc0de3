# One verb for each thing one does here, the same for people and for CI.

VENV := .venv
BIN := $(VENV)/bin
PINS := requirements/test.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# A name may be on the path and yet not start (a version manager's shim): so it is tried.
ifndef PYTHON
PYTHON := $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
endif

.PHONY: help demo test lint bench soak clean

help:
	@echo "make demo    train a classifier of digits on two processes"
	@echo "make test    run every test, the linters among them (ARGS='-k attach' picks some)"
	@echo "make lint    the linters alone"
	@echo "make bench   measure allreduce and training steps beside gloo and DistributedDataParallel"
	@echo "make soak    run the long tests"
	@echo "make clean   remove what the others made"

demo: $(VENV)/demo.stamp
	$(BIN)/overlap run -np 2 $(BIN)/python examples/torch_digits.py

# The test run's own summary is the last line, and tests/house runs the linters.
test: $(VENV)/test.stamp
	@$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/test.stamp
	$(BIN)/overlap bench allreduce
	$(BIN)/overlap bench step

soak: $(VENV)/test.stamp
	@$(BIN)/python -m pytest -m soak -o faulthandler_timeout=0 $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "Making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml $(PINS) | $(BIN)/python
	@echo "Installing overlap and what the demo needs (once, a minute or two)"
	@$(PIP) install --constraint $(PINS) --editable '.[demo]'
	@touch $@

$(VENV)/test.stamp: pyproject.toml $(PINS) | $(BIN)/python
	@echo "Installing overlap and what the tests need (once, a minute or two)"
	@$(PIP) install --requirement $(PINS)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@
