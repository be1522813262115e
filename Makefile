# Two commands for a newcomer: `make demo` and `make test`. Each sets up its own .venv first; both need Python >= 3.10.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INTEROP := .venv-interop
# With more processes than cores, OpenMP's spinning makes every rank process many times slower.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo pipeline engines test check spec bench slow interop format clean
help:
	@echo "make demo    a real language model, prefilled on 3 processes, decoded on 1 (about 3 minutes the first time)"
	@echo "make pipeline  a model that reads on 2 processes and draws on 6, compared with one process (about a minute)"
	@echo "make test    the tests"
	@echo "make check   linters, types, import contracts"
	@echo "make spec    the specification's own tests, where ../shared/spec is there"
	@echo "make bench   same-host handoff against a memcpy of the same bytes"
	@echo "make interop the released engine and omnikv, each sending to the other (installs gigabytes)"
	@echo "make slow    the tests that take minutes"

demo: $(VENV)/.ready-demo
	$(BIN)/omnikv demo $(ARGS)

pipeline: $(VENV)/.ready-cli
	$(BIN)/omnikv pipeline --out image.png $(ARGS)

# The engines of the fast networks, for the tests of the transports over them; without them those are skipped.
engines: $(VENV)/.ready-mooncake $(VENV)/.ready-nixl

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

slow: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m slow --timeout 900 $(ARGS)

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A pytest process of its own: the plugin offers an engine's import paths for the whole session.
spec: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -p omnikv.integrations.vllm_omni.pytest_plugin -p no:cacheprovider ../shared/spec/tests | tee $(VENV)/spec.log
	grep -Eq '(^|[ =])66 passed in' $(VENV)/spec.log

# Gigabytes, in an environment of its own: no part of `test`.
interop: $(VENV)/.ready-dev $(VENV)/.ready-mooncake $(INTEROP)/.ready
	$(BIN)/python tests/interop/check.py --released $(INTEROP)/bin/python --log $(INTEROP)/interop.log $(ARGS)

bench: $(VENV)/.ready-demo
	$(BIN)/python -m omnikv.bench same-host $(ARGS)

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "omnikv needs Python 3.10 or newer; try: make PYTHON=python3.11 demo"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	@touch $@

# The engine names packages for other hardware; what it needs on a CPU is told one by one, and the rest left out.
$(INTEROP)/.ready: tests/interop/requirements.txt constraints.txt
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --requirement tests/interop/requirements.txt
	$(INTEROP)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(INTEROP)/bin/python -m pip install --quiet --no-deps --constraint constraints.txt \
		vllm-omni==0.30.0 mooncake-transfer-engine-non-cuda
	@touch $@

clean:
	rm -rf $(VENV) $(INTEROP) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
