# Every target sets up what it needs: .venv is created, the package installed into it once per change of pyproject.toml.
# `make help` lists the targets; the text behind each `##` is what it prints.

.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
SETUP = @echo "Installing into $(VENV), once: PyTorch with its CUDA packages, about 6 GB on disk, a few minutes."

.PHONY: help release-check check demo example docs test lint slow wheel versions lock breadth breadth-quick families architectures packages property random bench gpu clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  make %-14s %s\n", $$1, $$2 }'

demo: $(VENV)/.stamp-demo  ## train, prune, compact and reload a small ResNet on real digits (start here)
	$(BIN)/python examples/digits.py

example: $(VENV)/.stamp-demo  ## one of the examples: make example NAME=vit ARGS="--epochs 4"
	@grep -qs "make example\|make demo" "examples/$(NAME).py" || { echo "make example NAME=x, where x is one of:"; \
		grep -l "make example\|make demo" examples/*.py | sed 's|examples/||; s|\.py$$||'; exit 2; }
	$(BIN)/python examples/$(NAME).py $(ARGS)

docs: $(VENV)/.stamp-docs  ## the pages of docs/ as a web site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

test: $(VENV)/.stamp-dev  ## the test suite, doctests included, on all cores
	$(BIN)/python -m pytest -q -m "not slow" -n auto --dist worksteal

lint: $(VENV)/.stamp-dev  ## ruff and mypy
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

check: $(VENV)/.stamp-dev  ## lint, types, and the tests beside the files that differ from main (BASE=<revision>)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python tests/changed.py $(or $(BASE),origin/main) | xargs --no-run-if-empty $(BIN)/python -m pytest -q -m "not slow"

breadth: $(VENV)/.stamp-dev  ## exactness on all 109 models of torchvision (half an hour; resumes), then its page
	$(BIN)/python benchmarks/breadth.py

breadth-quick: $(VENV)/.stamp-dev  ## the same for one model of each architecture (five minutes)
	$(BIN)/python benchmarks/breadth.py --quick

families: $(VENV)/.stamp-dev $(VENV)/.stamp-bench  ## exactness on the smallest model of each of timm's modules (an hour; resumes), then its page
	$(BIN)/python benchmarks/families.py

architectures: $(VENV)/.stamp-dev $(VENV)/.stamp-bench  ## the same on a small model of each architecture of transformers (half an hour; resumes)
	$(BIN)/python benchmarks/architectures.py

packages: $(VENV)/.stamp-dev $(VENV)/.stamp-bench  ## the same on networks of twenty packages, Ultralytics' among them (an hour; resumes)
	$(PIP) --no-deps --requirement benchmarks/networks/requirements.txt
	$(PIP) --constraint constraints.txt --requirement benchmarks/networks/dependencies.txt
	$(BIN)/python benchmarks/packages.py

slow: $(VENV)/.stamp-dev  ## the tests that take long: spawned processes, killed and resumed runs, all criteria with all scopes
	$(BIN)/python -m pytest -q -m slow

wheel: $(VENV)/.stamp-dev  ## build sdist and wheel, install the wheel into an empty environment, and use it there (ten minutes)
	$(BIN)/python -m pytest -q -m slow tests/test_distribution.py

release-check: $(VENV)/.stamp-venv  ## build sdist and wheel into dist/, install the wheel into an empty environment, and run the demo from there
	$(PIP) build twine
	rm -rf dist $(VENV)/release
	$(BIN)/python -m build --quiet --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(VENV)/release
	$(VENV)/release/bin/python -m pip install --disable-pip-version-check "$$(echo dist/*.whl)[examples]"
	$(BIN)/python tests/release_check.py $(VENV)/release

versions: $(VENV)/.stamp-dev  ## the tests on each Python, with the oldest and newest torch and Lightning, then their page (hours; ARGS="tests/engine")
	$(BIN)/python benchmarks/versions.py $(ARGS)

lock: $(VENV)/.stamp-venv  ## write constraints.txt anew: the versions that `make test` installs
	$(PIP) uv
	$(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 --extra dev --no-annotate --upgrade \
		--custom-compile-command "make lock" pyproject.toml --output-file constraints.txt

property: $(VENV)/.stamp-dev  ## 500 random networks under random masks
	$(BIN)/python -m pytest -q tests/engine/test_properties.py --hypothesis-profile=thorough

random: $(VENV)/.stamp-dev  ## random networks of traps: make random COUNT=10000 SEED=0 PROCESSES=2
	$(BIN)/python -m tests.engine.random_traps $(or $(SEED),0) $(or $(COUNT),1000) --processes $(or $(PROCESSES),1)

bench: $(VENV)/.stamp-bench  ## speed, memory, growth and latency beside Torch-Pruning (a quarter of an hour), then its page
	$(BIN)/python benchmarks/speed.py $(ARGS)

# A CUDA machine often brings its own torch and no way to install another: without a .venv that one is used as it is.
ifeq ($(MAKECMDGOALS)$(wildcard $(VENV)),gpu)
GPU_PYTHON := $(shell $(PYTHON) -c "import torch, pytest, pytorch_lightning" 2>/dev/null && echo $(PYTHON))
endif

gpu: $(if $(GPU_PYTHON),,$(VENV)/.stamp-dev)  ## the tests that need CUDA, then docs/gpu.md
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -q -m gpu tests/lightning_compress/test_gpu.py
	PYTHONPATH=. $(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu.py

clean:  ## remove .venv and the caches
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.stamp-venv:
	$(SETUP)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-demo: pyproject.toml $(VENV)/.stamp-venv
	$(PIP) --editable '.[examples]'
	@touch $@

$(VENV)/.stamp-docs: pyproject.toml $(VENV)/.stamp-venv
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.stamp-bench: pyproject.toml $(VENV)/.stamp-venv
	$(PIP) --editable '.[bench]'
	@touch $@

# dev holds all that examples needs, so this stands for both.
$(VENV)/.stamp-dev: pyproject.toml constraints.txt $(VENV)/.stamp-venv
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.stamp-demo
