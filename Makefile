# The two commands of the README are `make run` and `make test`; both set everything up on a bare machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    ?= runs/first

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev run keyboard base gboard test test-slow test-federation lint format bench docs site wheel clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Versions by constraints.txt, also of what builds the package; sums of what was fetched by hashes.txt. What has another
# sum is removed with all the rest: the next `make` would take it as installed. HASHES=no leaves the check out, for an
# index that builds its own files.
define INSTALL
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	    $(BIN)/pip install --quiet --disable-pip-version-check --report $(VENV)/installed.json -e $(1)
	$(if $(filter no,$(HASHES)),,$(BIN)/python check_hashes.py $(VENV)/installed.json || { rm -rf $(VENV); exit 1; })
	touch $@
endef

$(VENV)/base: pyproject.toml constraints.txt hashes.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call INSTALL,.)

$(VENV)/dev: $(VENV)/base
	$(call INSTALL,'.[dev]')

$(VENV)/keyboard: $(VENV)/base
	$(call INSTALL,'.[keyboard]')

setup: $(VENV)/base ## make .venv with what `make run` needs
setup-dev: $(VENV)/dev ## … and with what the tests need

run: setup ## train a federated keyboard model on the built-in corpus, count n-grams, mix them, report (about 5 minutes)
	$(BIN)/keyfed train --out $(RUN) --resume --config first.toml
	$(BIN)/keyfed counts $(RUN)

keyboard: $(VENV)/keyboard ## type in a browser, on the model of `make run` or on the base model
	$(BIN)/keyfed keyboard $(if $(filter-out runs/first,$(RUN)),$(RUN))

base: setup ## train the base model that comes along (hours on a CPU, minutes on a GPU) and pack it (docs/starting-smart.md)
	$(BIN)/keyfed pretrain --config studies/runs/base.toml --out runs/base --resume
	$(BIN)/keyfed counts runs/base
	$(BIN)/keyfed export runs/base --base --out src/keyfed/model/base

gboard: setup ## Gboard's comparison on chat: train (two hours on two cores), type, print the table; wants KEYFED_DATA
	$(BIN)/keyfed train fednesterov --config studies/runs/keyboard.toml --out runs/gboard --resume
	$(BIN)/keyfed train central --config studies/runs/keyboard-central.toml --out runs/gboard-central --resume
	$(BIN)/keyfed evaluate runs/gboard --against runs/gboard-central --keyboard --words 4000

# One process more than there are cores, and the browser first: its tests wait more than they compute, and files of few
# long tests would end the run alone where those of most tests came first. COVERAGE=yes counts the lines of src that were
# run, and prints the share at the end. Temporary files are in memory where Linux has two gigabytes of it for them: the
# tests rename tens of thousands. Compiled modules are kept: tests start processes.
IN_MEMORY := $(shell test "$$(df -Pk /dev/shm 2>/dev/null | awk 'NR==2 {print ($$4 > 2000000)}')" = 1 && echo TMPDIR=/dev/shm)
test: setup-dev lint ## lint, types, all tests but the slow ones (at most 10 minutes)
	PYTHONDONTWRITEBYTECODE= $(IN_MEMORY) $(BIN)/pytest -n $$($(BIN)/python -c "import os; print(os.cpu_count() + 1)") --dist loadfile --no-loadscope-reorder --doctest-modules \
	    $(if $(COVERAGE),--cov --cov-report=term) tests/web tests/end_to_end src tests

test-slow: setup-dev ## training to a quality on real corpora (minutes each)
	$(BIN)/pytest -m slow

test-federation: setup-dev ## a real federation on this machine: TLS, keys, Ctrl-C; the table of faults (minutes)
	$(BIN)/pytest -m "not slow" tests/faults tests/federation

lint: setup-dev ## ruff, mypy, the order of the rooms, plain English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/english.py

format: setup-dev ## let ruff format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## our engine beside the plain PyTorch loop
	$(BIN)/keyfed bench

docs: setup-dev ## write the generated pages of docs/ again
	$(BIN)/python -m keyfed.cli.reference docs
	$(BIN)/python scripts/architecture.py
	$(BIN)/python scripts/api.py
	$(BIN)/python benchmarks/stored.py

# The texts of docs/ with what they link to outside of it, in a folder that Zensical reads; warnings are errors.
SITE := build/site
$(VENV)/docs: $(VENV)/base
	$(call INSTALL,'.[docs]')

site: $(VENV)/docs ## the documentation as a site, in build/site/site
	$(BIN)/python scripts/site.py $(SITE)
	cd $(SITE) && $(abspath $(BIN))/zensical build --clean --strict

wheel: $(VENV)/dev ## the wheel, in dist/
	$(BIN)/python -m hatchling build -t wheel

clean: ## remove the virtual environment and caches (runs/ stays)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
