# Every target alone works on a fresh clone: it sets up .venv first, once.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP = .venv/bin/pip install -qq --disable-pip-version-check
PYTEST = .venv/bin/python -m pytest
# Two workers, each with whole modules, whose fixtures they share; as tests/conftest.py orders them, the long ones first.
WORKERS ?= 2
TOGETHER = -n $(WORKERS) --dist loadscope --no-loadscope-reorder
ARGS ?=

.PHONY: help setup demo test test-all test-gpu gpu check fmt bench accuracy docs clean

help:
	@echo "make demo      train a small GPT on 4 processes; ends with a report"
	@echo "make test      the tests (ARGS='-k plan' for some)"
	@echo "make test-all  and the slow ones      make test-gpu  those that need a GPU"
	@echo "make gpu       all that a GPU has to show, in one table (ARGS='--device sim' rehearses it)"
	@echo "make check     format, lint, types, floors      make fmt  put the format right"
	@echo "make docs      the documentation as a site, in build/site; opens from disk"
	@echo "make bench     tokens per second, beside plain PyTorch"
	@echo "make accuracy  the planner's prices, beside published measurements"

setup: .venv/ready

# The stamp is written last, so a set-up that was cut short is done again. torch first: its version is ours to choose.
.venv/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=python3.11 ...")'
	@echo "setting up .venv: $(TORCH), then the rest; once, a minute or two ..."
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[dev]"
	touch .venv/ready

demo: .venv/ready
	.venv/bin/unisono train --demo $(ARGS)

test: .venv/ready
	$(PYTEST) $(TOGETHER) -m "not slow and not gpu" $(ARGS)

test-all: .venv/ready
	$(PYTEST) $(TOGETHER) -m "not gpu" $(ARGS)

test-gpu: .venv/ready
	$(PYTEST) -m gpu $(ARGS)

gpu: .venv/ready
	.venv/bin/python benchmarks/gpu.py --all $(ARGS)

check: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright
	.venv/bin/lint-imports --no-logo

fmt: .venv/ready
	.venv/bin/ruff check --fix-only .
	.venv/bin/ruff format .

# Strict: a link that leads nowhere fails.
docs: .venv/ready
	.venv/bin/python docs/blocks.py
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "open build/site/index.html; with search: .venv/bin/python -m http.server --directory build/site"

bench: .venv/ready
	.venv/bin/python benchmarks/step.py $(ARGS)

accuracy: .venv/ready
	.venv/bin/python benchmarks/accuracy.py $(ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
