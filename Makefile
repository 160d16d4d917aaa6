# make train   set up .venv, then train GPT-2 on text that needs no download
# make test    set up what the tests need, then format, lint, type and behaviour checks, three tests at a time
# make ui      the runs side by side in MLflow
# make docs    the documentation as a site, in site/: needs no torch
# make bench   the ratios of docs/results.md, measured here
# make bench-peers   the trainer beside accelerate, transformers' Trainer and Lightning: installs them, then measures
# make release the wheel and the sdist in dist/, checked in a clean environment; then the tag of this version
# make test-avx2   the behaviour checks that depend on the kind of CPU, with no more than AVX2
# make test-oldest   the behaviour checks with the oldest torch, torchvision and transformers, in an environment of its own

# The first Python that runs here and fits.
FITS   := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
            $$python -c '$(FITS)' 2>/dev/null && { echo $$python; break; }; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
OLDEST ?= .venv-oldest
DOCS   ?= .venv-docs
# Of make train: beside an NVIDIA driver what the GPU has, bf16 or fp16.
PRECISION ?= $(if $(shell command -v nvidia-smi 2>/dev/null),auto,bf16)
# Tests at a time, for two cores: many of them wait for processes that they start.
TESTS  ?= 3
WORKERS := --numprocesses $(TESTS) --dist loadgroup --no-loadscope-reorder
CONSTRAINTS := constraints.txt
# uv where it is installed, else pip; both show what they download. `make UV=` takes pip.
UV     ?= $(shell uv --version >/dev/null 2>&1 && command -v uv)
INSTALL = $(if $(UV),"$(UV)" pip install --python $(BIN)/python,$(BIN)/python -m pip install --disable-pip-version-check) \
          --constraint $(CONSTRAINTS)

.PHONY: train test test-avx2 test-oldest docs release ui bench bench-peers setup clean

train: $(VENV)/.run
	$(BIN)/python scripts/train.py recipe=gpt2 recipe.size=nano data.tokenizer=bytes precision=$(PRECISION)

test: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS)

test-avx2: $(VENV)/.test
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest $(WORKERS) -m by_cpu

test-oldest:
	$(MAKE) $(OLDEST)/.test VENV=$(OLDEST) CONSTRAINTS=constraints-oldest.txt
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest $(WORKERS)

docs: $(DOCS)/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

release:
	PYTHON="$(PYTHON)" .ci/release tag

ui: $(VENV)/.run
	$(BIN)/python scripts/ui.py

bench: $(VENV)/.run
	$(BIN)/python benchmarks/bench.py

bench-peers: $(VENV)/.peers
	$(BIN)/python benchmarks/bench.py only=peers

setup: $(VENV)/.run

$(DOCS)/.docs: pyproject.toml
	@test -x $(DOCS)/bin/python || $(MAKE) $(DOCS)/bin/python VENV=$(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --group docs
	@touch $@

$(VENV)/bin/python:
	@$(or $(PYTHON),false) -c '$(FITS)' || { echo "Mantissa needs Python 3.11, 3.12 or 3.13; install one, or name it: make PYTHON=/path/to/python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	@echo "installing into $(VENV) (torch with CUDA is some 5 GB: minutes the first time)"
	$(INSTALL) $(if $(wildcard $@),--quiet) --editable ".[recipes]"
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(INSTALL) --quiet --editable ".[test]"
	@touch $@

$(VENV)/.peers: $(VENV)/.run
	$(INSTALL) --quiet --editable ".[peers]"
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(DOCS) site dist build *.egg-info .cache .mypy_cache .pytest_cache .ruff_cache
