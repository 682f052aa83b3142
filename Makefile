# Everything a fresh machine needs: `make demo` and `make test`. Both set up .venv first (a minute, 2 GB).
PYTHON ?= python3
BIN := .venv/bin
# Threads that spin while they wait are many times slower on a shared machine.
export OMP_WAIT_POLICY := passive
export HF_HUB_OFFLINE ?= 1
export WANDB_MODE ?= offline

.PHONY: setup demo test test-slow lint docs

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, and $(PYTHON) is `$(PYTHON) --version`; call make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Evaluates the head in data/tiny/head, then trains a small one on the embedded base into runs/demo and evaluates that.
demo: setup
	$(BIN)/python evaluate.py experiment=shipped
	$(BIN)/python train.py experiment=demo overwrite=true
	$(BIN)/python evaluate.py checkpoint=runs/demo decoding.nodes=adaptive overwrite=true threads=1

test: setup
	$(BIN)/python -m pytest -n 2

# The slow tests: statistical ones with many more samples, notebooks, whole studies.
test-slow: setup
	$(BIN)/python -m pytest -n 2 -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, into site/; without a network. Broken links fail.
docs: setup
	$(BIN)/zensical build --strict --clean
