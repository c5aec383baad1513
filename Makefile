# Two commands: `make train` trains a small GPT through a pipeline, `make test` lints, type-checks and tests.
# Each sets up what it needs in .venv on its first run, and starts at once afterwards.
#
#   make train ARGS="--schedule gpipe --steps 50"     flags of examples/train_gpt.py
#   make test  ARGS="tests/axes -x" WORKERS=0         arguments of pytest, and how many processes run tests
#   make test-slow                                    larger sizes and more random examples, of which CI runs a share a day
#   make test-tables                                  the tests that need no device, in seconds and without JAX
#   make test-numeric ISA=AVX2                        the tests that compare numbers, compiled for an older instruction set
#   make test-gpu                                     pipelines on a real GPU, one is enough; without one, on CPU devices
#   make test-versions                                a quick choice with the lowest and the highest versions that are allowed
#   make ... PYTHON=/path/to/python3.13               which Python makes .venv

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?=
ARGS ?=
WORKERS ?= 2
TORCH := 2.14.1

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# How XLA makes CPU code as shipped; `make test` has flags that compile in half the time (tests/conftest.py).
SHIPPED := --xla_backend_optimization_level=3 --xla_cpu_parallel_codegen_split_count=32
PARALLEL = --numprocesses $(WORKERS) --dist worksteal
# Without compiled bytecode every process compiles the tests and what they import again.
unexport PYTHONDONTWRITEBYTECODE

# Results that README and docs cite, those that are out of date: hours, from a clean commit.
.PHONY: results
results: $(VENV)/.ready-test
	$(BIN)/python -m benchmarks.regenerate --run

.PHONY: help train test test-slow test-tables verify lint clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -11

train: $(VENV)/.ready-train
	$(BIN)/python examples/train_gpt.py $(ARGS)

verify: $(VENV)/.ready-test
	$(BIN)/python examples/train_gpt.py --verify $(ARGS)

test: lint
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-slow: $(VENV)/.ready-test
	HYPOTHESIS_PROFILE=slow $(BIN)/python -m pytest -m '(slow or property) and not exhaustive' $(PARALLEL) $(ARGS)

test-tables: $(VENV)/.ready-tables
	PYTHONPATH=. $(BIN)/python -m pytest -m no_jax $(PARALLEL) $(ARGS)

# Other machines: the tests that compare numbers, compiled for an older instruction set (SSE4_2, AVX, AVX2, AVX512) than the machine's own.
# Compiled programs must not be kept from one set to the next: give each a cache of its own, or none.
.PHONY: test-numeric
test-numeric: $(VENV)/.ready-test
	XLA_FLAGS="$(SHIPPED) $(if $(ISA),--xla_cpu_max_isa=$(ISA)) $$XLA_FLAGS" $(BIN)/python -m pytest -m 'numeric and not slow and not exhaustive' $(PARALLEL) $(ARGS)

# A real GPU: JAX for it is installed (with an NCCL that has no known fault; torch brings another), and the results are written.
# Processes share the GPU; without one they have a CPU device each.
.PHONY: test-gpu
test-gpu: $(VENV)/.ready-test
	@set -e; if ls /dev/nvidia[0-9]* > /dev/null 2>&1; then \
	  version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); \
	  $(PIP) "jax[cuda13]==$$version" 'nvidia-nccl-cu13>=2.31.2'; \
	  export RESULTS=benchmarks/results/gpu_real.txt; \
	fi; \
	$(BIN)/python -m pytest -n 0 -m 'slow or exhaustive' tests/gpu_real $(ARGS)

# Other versions: the lowest and the highest that pyproject.toml allows, each in an environment of its own.
.PHONY: test-versions
test-versions: $(BIN)/python
	$(BIN)/python .ci/versions.py lowest $(ARGS)
	$(BIN)/python .ci/versions.py highest $(ARGS)

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build out .pytest_cache .mypy_cache .ruff_cache *.egg-info

# The newest Python that jax supports makes the virtual environment, of those that are found.
PYTHONS := $(or $(PYTHON),python3.14 python3.13 python3.12 python3 python)
$(BIN)/python:
	@set -euo pipefail; \
	for python in $(PYTHONS); do \
	  if "$$python" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 15))' 2>/dev/null; then \
	    echo "making $(VENV) with $$("$$python" --version) ($$(command -v "$$python"))"; \
	    exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo "jax needs Python 3.12, 3.13 or 3.14; none was found (tried: $(PYTHONS))." >&2; \
	for python in $(PYTHONS); do \
	  "$$python" -c 'import sys; print("  found, too old or too new:", sys.executable, sys.version.split()[0])' >&2 2>/dev/null || true; \
	done; \
	echo "Install one with its venv module (Debian: apt-get install python3.13 python3.13-venv), or name it: make PYTHON=/path/to/python3.13" >&2; \
	exit 1

$(VENV)/.ready-tables: | $(BIN)/python
	$(PIP) numpy packaging platformdirs rich pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

$(VENV)/.ready-train: pyproject.toml | $(BIN)/python
	@echo "installing jaxpipe and what the example needs into $(VENV)"
	$(PIP) -e '.[examples]'
	@touch $@

# The plugins that compile for described GPUs and TPUs have a folder of their own, which tests and benchmarks alone
# look into: JAX would load them in every program of this environment, and print that it finds no such device.
# torch goes first and alone: pip takes a CPU build where one is at hand, and nothing later replaces it.
$(VENV)/.ready-test: pyproject.toml | $(BIN)/python
	@echo "installing jaxpipe and what the tests need into $(VENV)"
	$(PIP) 'torch==$(TORCH)'
	$(PIP) -e '.[examples,test,dev]'
	@version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)'); \
	$(PIP) --no-deps --upgrade --target $(VENV)/compilers "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" || { \
	  echo "**********************************************************************************************"; \
	  echo "WARNING: jax-cuda13-plugin and jax-cuda13-pjrt $$version could not be installed: the tests that"; \
	  echo "compile GPU programs without a GPU will be SKIPPED.  Everything else is tested."; \
	  echo "**********************************************************************************************"; }
	@libtpu=$$($(BIN)/python -c 'from importlib.metadata import requires; print(next(r.split(";")[0] for r in requires("jax") if r.startswith("libtpu")))'); \
	$(PIP) --no-deps --upgrade --target $(VENV)/compilers "$$libtpu" || { \
	  echo "**********************************************************************************************"; \
	  echo "WARNING: $$libtpu could not be installed: the tests that compile TPU programs without a TPU"; \
	  echo "will be SKIPPED.  Everything else is tested."; \
	  echo "**********************************************************************************************"; }
	@touch $@ $(VENV)/.ready-train $(VENV)/.ready-tables
