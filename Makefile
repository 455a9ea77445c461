# Every target makes the environment it needs: nothing has to be installed before. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
OUTPUT_DIR ?= demo-output
WHEEL_DIR ?= dist
PYTEST_ARGS ?=
# On a machine without a GPU, https://download.pytorch.org/whl/cpu spares several GB of CUDA libraries.
TORCH_INDEX_URL ?=

BIN := $(abspath $(VENV))/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	$(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint format wheel clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

demo: $(VENV)/.installed ## compress the bundled trained model into demo-output, or OUTPUT_DIR
	$(BIN)/compress --ratio 0.5 --method drrqr --output-dir $(OUTPUT_DIR) --overwrite

test: $(VENV)/.installed-dev ## run the tests that need no GPU and are not slow; PYTEST_ARGS adds arguments
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not gpu and not slow" $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev ## run the slow ones
	$(BIN)/python -m pytest -n auto --dist loadfile -m "slow and not gpu" $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## check style and types
	PATH="$(BIN):$$PATH" pre-commit run --all-files

format: $(VENV)/.installed-dev ## rewrite what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: $(VENV)/bin/python ## build a wheel into dist, or WHEEL_DIR
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(WHEEL_DIR) .

clean: ## remove the environment and what the targets wrote
	rm -rf $(VENV) $(OUTPUT_DIR) $(WHEEL_DIR)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The installation is editable, so only a change of the dependencies calls for another.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed
