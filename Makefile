# Everything a fresh machine needs: `make demo` and `make test`. Both set up .venv first (a minute, 2 GB).
PYTHON ?= python3
BIN := .venv/bin
# On a machine that is shared, threads that spin while they wait are many times slower.
export OMP_WAIT_POLICY := passive
export HF_HUB_OFFLINE ?= 1
export WANDB_MODE ?= offline

.PHONY: setup demo test test-slow lint

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, and $(PYTHON) is `$(PYTHON) --version`; call make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Trains a CTC draft head on the embedded base into runs/demo, decodes with it, prints the table.
demo: setup
	$(BIN)/python train.py experiment=demo overwrite=true
	$(BIN)/python evaluate.py checkpoint=runs/demo overwrite=true threads=1

test: setup
	$(BIN)/python -m pytest -n 2

# The same laws with many times the draws.
test-slow: setup
	$(BIN)/python -m pytest -n 2 -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
