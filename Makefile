# make test: lint, types and tests. Sets up .venv the first time; repeats quickly.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test lint types tests clean
test: lint types tests

# Installed again only when what is installed has changed.
.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.ready
	$(BIN)/mypy

# One torch thread a worker: more of them only fight over the cores.
tests: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
