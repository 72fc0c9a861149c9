# Everything a newcomer or a contributor runs. Needs make and Python 3.11 or later (with venv and pip), nothing else.
# Dependencies come from the lock files, by hash, into $(VENV); a stamp makes the second run instant.

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
RUN_READY := $(VENV)/.duetime-run
DEV_READY := $(VENV)/.duetime-dev
SEEDS ?= 200
MINUTES ?= 10
MODULES ?= engine/shard
JOBS ?= 2
RUNS ?= 3
# Tests that need nothing but Python: no database server, no container, no network.
UNIT := tests/unit tests/docs tests/conformance/test_stores.py
# The fast ones first, so that they fail first; then those of which single files take minutes.
TESTS := $(wildcard tests/unit tests/docs tests/sim tests/e2e tests/conformance)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-nats serve unit test steady test-tidb check sim prove mutate chaos format bench lock clean

help: ## list the targets
	@echo "Duetime: a durable timer service. Targets:"; echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

demo: $(RUN_READY) ## watch timers fire on a temporary server
	@$(BIN)/duetime demo

demo-nats: $(DEV_READY) ## the same with a temporary NATS server: commands in, events out; ends by itself
	@$(BIN)/python -m scripts.demo_nats

serve: $(RUN_READY) ## run a server on ./duetime.db at http://127.0.0.1:8463
	@$(BIN)/duetime serve

unit: $(DEV_READY) ## the fast tests (two minutes, no databases): unit, docs, memory and SQLite, SEEDS=200 of the simulator
	$(BIN)/python -m scripts.run_tests $(UNIT) --seeds $(SEEDS)

test: check ## set up and pass all tests: check, unit, docs, conformance, simulation, end to end
	$(BIN)/python -m scripts.run_tests $(TESTS)

steady: $(DEV_READY) ## TESTS="tests/e2e tests/conformance" RUNS=3 times beside two busy loops; names those that fail; can be continued
	$(BIN)/python -m scripts.gate.steady --runs $(RUNS) $(if $(filter command line environment,$(origin TESTS)),$(TESTS),tests/e2e tests/conformance)

test-tidb: $(DEV_READY) ## the tests of a database on TiDB too, which is built first (a quarter of an hour, 5 GB)
	DUETIME_TEST_TIDB=1 $(BIN)/python -m pytest -m tidb \
	  tests/conformance/test_mysql.py tests/conformance/test_mysql_zombies.py tests/e2e/test_mysql_setup.py \
	  tests/e2e/test_every_database.py

check: $(DEV_READY) ## lint, format, strict types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

sim: $(DEV_READY) ## run SEEDS=200 seeds of the simulated cluster; for a failing seed prints the command that repeats it
	$(BIN)/python -m duetime.testing.simulate --seeds $(SEEDS)

prove: $(DEV_READY) ## seeds run, faults by kind, mutants caught, statements reached, cases of the failure catalogue
	$(BIN)/python scripts/prove.py --seeds $(SEEDS)

mutate: $(DEV_READY) ## change single lines of MODULES="engine/shard engine/flow" and see whether a test fails (takes minutes)
	$(BIN)/python -m scripts.mutate $(MODULES) --jobs $(JOBS)

chaos: $(DEV_READY) ## three instances on a real PostgreSQL with random faults for MINUTES=10, judged by the checker
	DUETIME_CHAOS_MINUTES=$(MINUTES) $(BIN)/python -m pytest tests/e2e/test_cluster_chaos.py -k random_faults -s

format: $(DEV_READY) ## format the code, fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV_READY) ## the figures of the README, each beside the limit of the machine; prints JSON (takes minutes)
	$(BIN)/python -m benchmarks.core

lock: $(BIN)/python ## write the lock files anew, with the newest versions pyproject.toml allows
	@$(BIN)/python -c "import uv" 2>/dev/null || $(PIP) install uv
	$(call compile,requirements.lock,--group build)
	$(call compile,requirements-dev.lock,--group build --group dev --constraint requirements.lock)

clean: ## remove what make made; a duetime.db stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- how it is set up ------------------------------------------------------------------------------

$(BIN)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14; do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(VENV) with $$($$python --version)"; exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "Duetime needs Python 3.11 or later with venv and pip. On Debian and Ubuntu: apt install python3-venv."; \
	echo "If there is one under another name: make PYTHON=/path/to/python3.11 ..."; exit 1

# hatchling and what it needs are in the lock, so the package itself is built without fetching anything else.
$(RUN_READY): requirements.lock pyproject.toml | $(BIN)/python
	@echo "installing dependencies, as locked"
	@$(PIP) install --require-hashes -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV_READY): requirements-dev.lock $(RUN_READY)
	@echo "installing tools for checks and tests, as locked"
	@$(PIP) install --require-hashes -r requirements-dev.lock
	@touch $@

define compile
@echo "writing $(1)"
@{ echo "# Every dependency by version and hash. Written by 'make lock'; do not edit."; \
  $(BIN)/python -m uv pip compile pyproject.toml $(2) --upgrade --quiet --universal --python-version 3.11 \
    --generate-hashes --no-header --no-emit-index-url; } > $(1).new && mv $(1).new $(1)
endef
