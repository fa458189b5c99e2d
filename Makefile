# make demo: explain the built-in photo.  make test: lint, types and tests.
# Each sets up .venv the first time and repeats quickly.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e

INSTALLED := pyproject.toml constraints.txt build_native.py $(wildcard src/rectgrad/kernels/native/*)

.PHONY: demo test lint types tests clean
demo: .venv/.demo
	$(BIN)/rectgrad explain --out demo

test: lint types tests

# Installed again only when what is installed has changed.
.venv/.demo: $(INSTALLED)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) '.[imagenet]'
	@touch $@

.venv/.test: $(INSTALLED)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) '.[test]'
	@touch $@ .venv/.demo

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test
	$(BIN)/mypy

# One torch thread a worker: more of them only fight over the cores.
tests: .venv/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

clean:
	rm -rf .venv demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
