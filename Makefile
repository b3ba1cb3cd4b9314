# rollgrid: every command a person or a machine needs.  `make` prints them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
ROLLGRID_ENGINE ?= cpu
export VENV ROLLGRID_ENGINE
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help setup check lint-fix test test-fast clients-env test-clients test-trl models demo up down train train-study bench bench-refresh bench-sessions bench-delta bench-link chaos lock clean \
        up-compose down-compose test-compose

help: ## print this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'
	@echo
	@echo "  VENV=<folder>                    another place for the environment (now $(VENV))"
	@echo "  ROLLGRID_ENGINE=cpu|cuda|none    the engine to install (now $(ROLLGRID_ENGINE))"
	@echo "  ARGS='...'                       passed on, e.g. make test-fast ARGS='-k ledger'"

setup: ## make the environment from the lock (needs Python 3.11; may use apt and says so)
	@scripts/setup.sh

check: setup ## lint, format, strict types, import rules, declared dependencies, lock in step
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/declared_imports.py
	$(BIN)/python scripts/lock.py check

lint-fix: setup ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

models: setup ## prepare the small models that the demo and the tests use (cached)
	$(BIN)/rollgrid models prepare

test: models ## every test, those on the real engine and real servers included
	@scripts/test.sh $(ARGS)

clients-env: setup ## the environments of the clients that `test-clients` runs (cached in .venv-clients)
	$(BIN)/python -m tests.clients.environments

test-clients: models clients-env ## Inspect, TextArena, TRL and verifiers, unmodified, against the whole stack on real vLLM; part of `test`
	$(BIN)/pytest tests/clients -m clients $(ARGS)

test-trl: models ## the part of `test-clients` in which TRL's GRPOTrainer learns through rollgrid
	$(BIN)/python -m tests.clients.environments trl
	$(BIN)/pytest tests/clients/test_trl.py -m clients $(ARGS)

test-fast: setup ## the tests without the engine and without the slow ones
	$(BIN)/pytest -m "not vllm and not chaos and not slow and not power and not clients" $(ARGS)

demo: setup ## one command from nothing to real rollouts
	$(BIN)/rollgrid demo $(ARGS)

up: setup ## start the stack on this machine and stay in front
	$(BIN)/rollgrid up $(ARGS)

down: ## stop the stack
	$(BIN)/rollgrid down $(ARGS)

up-compose: models ## the stack in containers, until it is healthy (ARGS='ROLLGRID_SAMPLER_ENGINE=scripted' sets; docs/deploy/compose.md)
	$(BIN)/python deploy/credentials.py $(ARGS)
	PYTHON=$(BIN)/python deploy/compose.sh build volumes
	PYTHON=$(BIN)/python deploy/compose.sh build sampler
	PYTHON=$(BIN)/python deploy/compose.sh up --detach --wait

down-compose: ## stop the containers; the volumes stay (ARGS=--volumes removes them as well)
	PYTHON=$(BIN)/python deploy/compose.sh down $(ARGS)

test-compose: models ## deploy/compose.yaml brought up for real and tested (skips, and says why, without an engine)
	ROLLGRID_COMPOSE=1 $(BIN)/pytest tests/compose $(ARGS)

train: setup ## a trainer of its own learns on the fleet: a picture and the figures in own-trainer/ (ARGS=--max-staleness=2)
	$(BIN)/python -m examples.own_trainer $(ARGS)

train-study: setup ## five seeds against a colocated engine, with intervals (ARGS=--faults: with kills and broken weights)
	$(BIN)/python -m examples.own_trainer.study $(ARGS)

bench: setup ## every figure beside its budget: control plane, tenants, engine overhead, latency (ARGS=--quick)
	$(BIN)/python -m benchmarks $(ARGS)

bench-refresh: setup ## what new weights cost: the pause, tokens lost, publish to first new token (ARGS='--models tiny')
	$(BIN)/python -m benchmarks.refresh $(ARGS)

bench-sessions: setup ## what a turn costs: latency over the engine, sessions a second, Redis operations and flushes (ARGS=--quick)
	$(BIN)/python -m benchmarks.sessions $(ARGS)

bench-delta: setup ## what a weight update weighs: full, xor, gaps, LoRA, ours and the entropy bound, on real AdamW steps
	$(BIN)/python -m benchmarks.delta $(ARGS)

bench-link: setup ## publish to first new token over a link of 100 Mbit/s: full, delta and LoRA, as ratios
	$(BIN)/python -m benchmarks.link $(ARGS)

chaos: models ## the long kill storm; prints its seeds
	ROLLGRID_CHAOS=long $(BIN)/pytest tests/chaos -m chaos --timeout=3600 $(ARGS)

lock: setup ## resolve the dependencies again (ARGS=--upgrade takes the newest)
	$(BIN)/python scripts/lock.py write $(ARGS)

clean: ## remove caches; the environment and the state of the stack stay
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
