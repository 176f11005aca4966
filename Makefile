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
# More for every pip call: PIP_ARGS="--index-url https://mirror.example/simple" for one.
PIP_ARGS ?=

PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check install $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test check docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.runtime ## install into .venv, then profile, plan and run the bundled model
	$(BIN)/hotsplit demo

test: check ## everything that CI checks: `make check`, then the whole test suite
	$(BIN)/python -m pytest

check: $(VENV)/.dev ## lint, types, import contracts, spelling, generated docs
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

clean: ## remove the virtual environment and all that tools left
	rm -rf $(VENV) build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each step runs once, and again when what it depends on is newer.

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

$(VENV)/.runtime: $(VENV)/.torch-$(TORCH_VERSION) $(VENV)/.transformers-$(TRANSFORMERS_VERSION) pyproject.toml
	@echo "Installing hotsplit and what it runs on"
	@$(PIP) -e '.[transformers]' torch==$(TORCH_VERSION) transformers==$(TRANSFORMERS_VERSION)
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime pyproject.toml
	@echo "Installing the tools for tests"
	@$(PIP) -e '.[transformers,dev]' torch==$(TORCH_VERSION) transformers==$(TRANSFORMERS_VERSION)
	@touch $@
