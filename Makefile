# `make serve` and `make test` work on a fresh machine with Python 3.11 or newer; everything goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: serve test test-long lint bench clean

serve: .venv/.installed  ## ARGS="MODEL --port 9000" goes to `abyssal serve`
	$(BIN)/abyssal serve $(ARGS)

# One process per core, each with one thread. Files in order: the last ones are small, so that no core is without work for long.
test: export OMP_NUM_THREADS = 1
test: .venv/.installed-dev
	$(BIN)/python -m pytest -q -m "not long" -n auto --dist loadscope --no-loadscope-reorder $(ARGS)

test-long: .venv/.installed-dev
	$(BIN)/python -m pytest -q -m long $(ARGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.installed-dev
	$(BIN)/python bench/cpu_vs_transformers.py $(ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests bench -name __pycache__ -prune -exec rm -rf {} +

# Stamps: installed again when the dependencies change. The package itself is editable, so its code never goes stale.
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing PyTorch and what else is needed into .venv, quietly: this takes minutes, and gigabytes on Linux"
	$(INSTALL) --editable .
	touch $@

.venv/.installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable '.[dev]'
	touch .venv/.installed $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "Abyssal needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
