# Each target starts from a fresh clone with Python 3.10 or newer and make, and nothing else.
#
#   make demo     train through four faults and compare bit for bit with a run without them
#   make test     the tests that show that each capability works
#   make test-all   these and the long ones: parity, frameworks, Slurm, Ray, hosts, attacks, campaigns
#   make lint     format, lint, types, layers
#   make check    lint and the tests that start no job, before each commit
#   make site     the documentation as a web site in site/
#   make bench    list the benchmarks
#   make test-gpu   the tests that need a GPU, each in a process of its own; VENV names one whose torch knows it
#   make bench-gpu  the figures that need a GPU, as JSON lines
#   make matrix   test several versions of Python and torch (hours; MATRIX="--python 3.12 --torch 2.6" chooses)
#   make clean    remove what the other targets made
#
# PYTHON=python3.12 chooses the interpreter, VENV=/tmp/v the folder of the environment, TORCH="torch==2.9.1"
# another torch. On Linux PyPI's torch includes CUDA (several GB); set PIP_EXTRA_INDEX_URL to PyTorch's CPU index
# to avoid it.

PYTHON ?= python3
VENV ?= .venv
OURS := $(shell grep '^torch==' constraints.txt)
TORCH ?= $(OURS)
# A release of torch may require one release of sympy, which is not ours, and cfn-lint requires ours.
OF_TORCH := $(if $(filter $(OURS),$(TORCH)),torch,torch|sympy|cfn-lint)
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
READY := $(VENV)/.installed
# Without compiled files each process of tests would rewrite the assertions of all of them.
unexport PYTHONDONTWRITEBYTECODE
# Tests that start jobs mostly wait, so twice as many run at a time as there are processors.
PYTEST = $(VENV)/bin/python -m pytest -q --dist loadfile --no-loadscope-reorder -n $$((2 * $$(nproc)))

# Types of the benchmarks: only whether the names that they use exist; other projects are not installed.
OF_BENCHES := --explicit-package-bases --ignore-missing-imports --disable-error-code=assignment --disable-error-code=operator --disable-error-code=misc

.PHONY: help demo test test-long test-all lint check site bench test-gpu bench-gpu matrix clean

help:
	@sed -n 's/^#   //p' Makefile

# torch is installed first and alone, so that no other package installs another build of it, and named again
# beside the others, so that none replaces it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	grep -Ev '^($(OF_TORCH))==' constraints.txt > $(VENV)/constraints.txt
	$(PIP) --constraint $(VENV)/constraints.txt '$(TORCH)'
	$(PIP) --constraint $(VENV)/constraints.txt '$(TORCH)' --editable '.[dev,docs,frameworks]'
	touch $@

demo: $(READY)
	$(VENV)/bin/outlast demo

# Processes of tests start faster where the modules are compiled.
test: $(READY)
	$(VENV)/bin/python -m compileall -q src tests
	$(PYTEST) -m "not long" tests

test-long: $(READY)
	$(VENV)/bin/python -m compileall -q src tests
	$(PYTEST) -m long tests

test-all: test test-long

lint: $(READY)
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/mypy
	MYPYPATH=src:bench $(VENV)/bin/mypy --config-file= $(OF_BENCHES) bench
	$(VENV)/bin/lint-imports --no-logo --no-cache

check: lint
	$(PYTEST) -m "not long and not launched" tests

# The variable switches off a notice about MkDocs 2, which constraints.txt rules out.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet --strict
	@echo "site/index.html; with its search: $(VENV)/bin/python -m http.server --directory site"

bench:
	@echo "Each benchmark prints a table and writes JSON lines. Run one with $(VENV)/bin/python:"
	@for script in $$(grep -l __main__ bench/*.py); do sed -n "1s|^\"\"\"|  $$script  |p" $$script | sed 's/"""$$//'; done

test-gpu: $(READY)
	$(VENV)/bin/python -m tests.gpu

bench-gpu: $(READY)
	$(VENV)/bin/python bench/gpu.py --out gpu.jsonl

matrix:
	$(PYTHON) -m tests.support.matrix $(MATRIX)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist matrix-logs site
