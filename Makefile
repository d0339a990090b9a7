# Every command of the project; `make` alone lists them. A bare Python with venv is all it needs.

PYTHON ?= python3
# Another package index for torch alone, such as PyTorch's own for CPU wheels; empty: the default.
TORCH_INDEX ?=
# Another torch than the pinned one, such as 2.11.0 (which brings its own setuptools and Triton); empty: the pin.
TORCH ?=
# Passed on to what the target runs: make test ARGS="-k varlen"
ARGS ?=
VENV ?= .venv
# On a machine with a GPU: a Python that has torch, triton, pytest and pytest-xdist.
GPU_PYTHON ?= python3
WORKERS ?= 2
# Whose compilers `compile-test` runs: the oldest that pyproject.toml allows, and the newest.
TRITONS ?= 3.6.0 3.9.0

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PINS := $(VENV)/constraints.txt
PIP := $(BIN)/python -m pip -qq --no-input --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# Tests in Triton's interpreter.
INTERPRETED := tests/contract tests/cases tests/dense tests/kernels tests/linear tests/parallel
LABS := $(sort $(wildcard labs/[0-9]*.py))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env run test slow-test interpreter-test compile-test gpu-test gpu-memcheck lint format labs notebooks docs site bench gpu-bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Variables: PYTHON VENV TORCH_INDEX TORCH ARGS WORKERS (see the top of the Makefile)'

env: $(READY)  ## make the environment in .venv, from the pins; every target does so when it must

run: $(READY)  ## the main job: tilewise report, which checks, measures and writes build/report.html
	@mkdir -p build
	@$(BIN)/tilewise report --output build/report.html $(ARGS)

test: $(READY)  ## all tests, but the slow ones, and the kernels in the interpreter, the compiler, on a GPU
	@$(PYTEST) --ignore tests/compile -m "not slow" $(ARGS)

slow-test: $(READY)  ## the slow ones: examples, training, notebooks, the report, emulated kernels
	@$(PYTEST) --ignore tests/compile -m slow $(ARGS)

interpreter-test: $(READY)  ## the kernels in Triton's interpreter, on the CPU
	@TRITON_INTERPRET=1 $(PYTEST) --backend triton $(INTERPRETED) $(ARGS)

compile-test: $(TRITONS:%=build/triton-%/.ready)  ## compile the kernels for GPUs that are not here
	@set -e; for version in $(TRITONS); do \
	  PYTHONPATH="$(CURDIR)/build/triton-$$version" \
	  $(PYTEST) -q --triton $$version tests/compile $(ARGS); done

gpu-test:  ## the suite on a GPU, which records that the kernels passed it
	@$(GPU_PYTHON) tools/gpu_test.py $(ARGS)

gpu-memcheck:  ## some of every op's calls on a GPU under compute-sanitizer
	@$(GPU_PYTHON) tools/gpu_memcheck.py $(ARGS)

lint: $(READY)  ## formatting, lint, types, size budget; changes nothing
	@failed=0; \
	$(BIN)/ruff format --check . || failed=1; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/mypy || failed=1; \
	$(BIN)/python tools/size_budget.py || failed=1; \
	exit $$failed

format: $(READY)  ## put the formatting right, and what lint can mend by itself
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

labs: $(READY)  ## run every lab on the CPU; a warning is an error
	@mkdir -p build
	@set -e; for lab in $(LABS); do echo "== $$lab"; \
	  MPLBACKEND=Agg $(BIN)/python -W error $$lab $(ARGS) > build/lab.txt || { cat build/lab.txt; exit 1; }; \
	  cat build/lab.txt; grep -q "Exercise 3: not attempted yet." build/lab.txt; done

notebooks: $(READY)  ## render the labs to notebooks under build/labs, executed
	@$(BIN)/python labs/render.py --execute $(ARGS)

docs: $(READY)  ## run the documents' commands and examples, and check their links
	@$(BIN)/python tools/check_docs.py $(ARGS)

site: $(READY) build/site-env/.ready  ## build the documentation site into build/site; a warning is an error
	@$(BIN)/python tools/site.py
	@NO_MKDOCS_2_WARNING=1 PYTHONWARNINGS=error build/site-env/bin/mkdocs build --strict --quiet $(ARGS)
	@$(BIN)/python tools/site.py --check build/site
	@echo "The site is in build/site/index.html"

bench: $(READY)  ## tilewise bench
	@$(BIN)/tilewise bench $(ARGS)

gpu-bench:  ## tilewise bench on a GPU, stored under benchmarks/results
	@$(GPU_PYTHON) -m tilewise bench --device cuda --output benchmarks/results $(ARGS)

clean:  ## remove what the targets wrote, except the environment
	@rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# Torch from another index comes first and alone: its own dependencies may not be there.
$(READY): pyproject.toml requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Tilewise needs Python 3.10 or newer; name one with PYTHON=..." if sys.version_info < (3, 10) else 0)'
	@echo "Making $(VENV) from requirements/constraints.txt; the first time, torch's download takes minutes."
	@$(PYTHON) -m venv $(VENV) || { echo "No venv in this Python; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@sed $(if $(TORCH),-e 's/^torch==.*/torch==$(TORCH)/' -e '/^setuptools==/d' -e '/^triton==/d') -e '/^#/d' requirements/constraints.txt > $(PINS)
	@echo "  torch: 200 MB, several GB where the index has builds for GPUs"
	@$(PIP) install $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) -c $(PINS) torch
	@echo "  Tilewise and what its checks need: 300 MB"
	@$(PIP) install -c $(PINS) -e '.[dev]'
	@touch $@

build/site-env/.ready: requirements/docs.txt
	@$(PYTHON) -c 'import sys; sys.exit("The site needs Python 3.11 or newer; name one with PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "Making $(@D) from requirements/docs.txt."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip -qq --no-input --disable-pip-version-check install -r requirements/docs.txt
	@touch $@

build/triton-%/.ready: $(READY)
	@echo "Installing Triton $* in $(@D)."
	@rm -rf $(@D)
	@$(PIP) install --no-deps --target $(@D) triton==$*
	@touch $@
