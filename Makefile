# Every target sets up what it needs: .venv is created, the package installed into it once per change of pyproject.toml.
#
#   make demo      train, prune, compact and reload a small ResNet on real digits, and print what came of it
#   make example   one of the examples, as in: make example NAME=vit ARGS="--epochs 4"
#   make docs      the pages of docs/ as a web site in site/
#   make test      the test suite, doctests included
#   make slow      the tests that take long: spawned processes, runs that are killed and resumed, all criteria with all scopes
#   make lint      ruff and mypy
#   make breadth   exactness on all 109 models of torchvision (half an hour; resumes where it stopped), then the page about it
#   make breadth-quick  the same for one model of each architecture (five minutes)
#   make families   exactness on the smallest model of each of timm's modules (an hour; resumes), then the page about it
#   make architectures  the same on a small model of each architecture of transformers (half an hour; resumes)
#   make packages   the same on networks of vit-pytorch, segmentation-models-pytorch and MONAI (five minutes)
#   make property  500 random networks under random masks
#   make bench     speed, memory, growth and latency beside Torch-Pruning, then docs/benchmarks.md (a quarter of an hour)
#   make gpu       the tests that need CUDA, then docs/gpu.md
#   make clean     remove .venv and the caches

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo example docs test lint slow breadth breadth-quick families architectures packages property bench gpu clean
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp-demo
	$(BIN)/python examples/digits.py

example: $(VENV)/.stamp-demo
	@test -f "examples/$(NAME).py" || { echo "make example NAME=x, where x is one of:"; ls examples | sed -n 's/\.py$$//p'; exit 2; }
	$(BIN)/python examples/$(NAME).py $(ARGS)

docs: $(VENV)/.stamp-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

test: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -q -m "not slow"

lint: $(VENV)/.stamp-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

breadth: $(VENV)/.stamp-dev
	$(BIN)/python benchmarks/breadth.py

breadth-quick: $(VENV)/.stamp-dev
	$(BIN)/python benchmarks/breadth.py --quick

families: $(VENV)/.stamp-dev $(VENV)/.stamp-bench
	$(BIN)/python benchmarks/families.py

architectures: $(VENV)/.stamp-dev $(VENV)/.stamp-bench
	$(BIN)/python benchmarks/architectures.py

packages: $(VENV)/.stamp-dev $(VENV)/.stamp-bench
	$(BIN)/python benchmarks/packages.py

slow: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -q -m slow

property: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -q tests/engine/test_properties.py --hypothesis-profile=thorough

bench: $(VENV)/.stamp-bench
	$(BIN)/python benchmarks/speed.py $(ARGS)

# A CUDA machine often brings its own torch and no way to install another: without a .venv that one is used as it is.
ifeq ($(MAKECMDGOALS)$(wildcard $(VENV)),gpu)
GPU_PYTHON := $(shell $(PYTHON) -c "import torch, pytest, pytorch_lightning" 2>/dev/null && echo $(PYTHON))
endif

gpu: $(if $(GPU_PYTHON),,$(VENV)/.stamp-dev)
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -q -m gpu tests/lightning_compress/test_gpu.py
	PYTHONPATH=. $(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu.py

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.stamp-venv:
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
$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-venv
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.stamp-demo
