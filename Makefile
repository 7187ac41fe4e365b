# Two commands do everything, each on a fresh clone: `make demo` and `make test`.

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: demo test setup lint clean

demo: setup
	$(BIN)/limbeck demo --out runs/demo

test: setup lint
	$(BIN)/python -m pytest tests -n 2 --dist loadfile

setup: $(VENV)/.ready

# torch first and alone: asked for by another package, pip would take a build with gigabytes of CUDA.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) runs build
