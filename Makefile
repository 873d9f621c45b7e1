# Everything runs in a virtual environment, .venv, which the first target that needs it
# makes. To take another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SITE   := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.PHONY: help env test lint types docs dist check-dist demo bench chaos clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP) ## Make the virtual environment, or update it

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: lint types ## Check everything, two test files at a time; ten minutes on two cores
	$(BIN)/pytest -n 2 --dist loadfile

lint: env ## Check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: env ## Check types
	$(BIN)/mypy

$(SITE): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(SITE) ## Build the documentation as a site, warnings as errors; writes out/site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo out/site/index.html

dist: env ## Build what is published, sdist and wheel, in dist/
	rm -rf build dist
	$(BIN)/python -m build --quiet

check-dist: dist ## Use the wheel in an empty environment, test what the sdist has
	$(BIN)/python tests/check_dist.py

demo: env ## Train with DDP and with DiLoCo, two workers each; writes out/demo/
	$(BIN)/python recipes/demo.py

bench: env ## Run the benchmarks; each prints one JSON line per figure
	@set -e; for file in $(wildcard benchmarks/[a-z]*.py); do $(BIN)/python $$file; done

chaos: env ## Train under killed, stopped, cut and replaced workers; about an hour
	@set -e; for seed in 1 2; do \
		$(BIN)/python recipes/chaos.py --seed $$seed --method diloco; \
		$(BIN)/python recipes/chaos.py --seed $$seed --method streaming; \
		$(BIN)/python recipes/chaos.py --seed $$seed --method desloc --faults 10; \
		$(BIN)/python recipes/chaos.py --seed $$seed --method noloco --faults 10; \
	done

clean: ## Remove .venv, caches and build products; out/ stays
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
