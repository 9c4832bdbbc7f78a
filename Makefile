# `make ladder` and `make test` each work as the first and only command after a clone. `make help` lists the others.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
# crazyflow wants this before SciPy is imported; one process may run notebooks that import SciPy before others that fly.
export SCIPY_ARRAY_API := 1
.PHONY: help setup ladder qualify test lab notebooks clean-notebooks check-drift export readme

# The first of these that is Python 3.11 or newer; any other one: make PYTHON=/path/to/python3 ...
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed

help: ## list what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1|\2/' | awk -F'|' '{printf "  %-22s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv with the pinned packages

$(STAMP): constraints.txt pyproject.toml
	@if [ -z "$(PYTHON)" ]; then echo "no Python 3.11 or newer found: install one, or name it with make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; fi
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv || { echo "the venv module is missing: on Debian and Ubuntu, apt-get install python3-venv" >&2; rm -rf .venv; exit 1; }
	@echo "installing the pinned packages into .venv; the first time this takes two to four minutes"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input --constraint constraints.txt --editable '.[car,dev,search]' 2>&1 \
		| tee .venv/install.log | awk '/^(Collecting|Installing)/ { sub(/[;<>=!~(\[].*/, "", $$2); print "  " $$1, $$2; fflush() }' \
		|| { echo "the installation failed; its last words (all of them: .venv/install.log):" >&2; tail -n 15 .venv/install.log >&2; exit 1; }
	@touch $@
	@echo "set up: $$($(BIN)/python --version) in .venv"

ladder: setup ## the main job: train, examine, gate and report the eleven rungs of the tracker
	@$(BIN)/rlnb ladder

qualify: setup ## the ladder under seeds 1, 2 and 3, and a summary of median and worst
	@$(BIN)/rlnb qualify --seeds 1-3

test: setup ## all tests: drift, style, source notebooks, pytest
	@$(BIN)/python -m rlnb.cli.drift
	@$(BIN)/ruff check --quiet . && echo "ruff: clean"
	@for part in lab tracker race index.ipynb; do $(BIN)/nbdev-test nbs/$$part --n-workers 2 || exit 1; done  # in parts: compiled programs pile up in memory; pytest runs those of the car
	@echo "notebooks: all source notebooks run"
	@$(BIN)/python -m pytest

lab: setup ## open JupyterLab
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root)

notebooks: setup ## execute the source notebooks and keep their outputs
	@$(BIN)/nbdev-test nbs --n-workers 2 --save

export: setup ## write the modules from the notebooks
	@$(BIN)/nbdev-export

clean-notebooks: setup ## take volatile metadata out of the source notebooks
	@$(BIN)/nbdev-clean

check-drift: setup ## notebooks, modules and README say the same
	@$(BIN)/python -m rlnb.cli.drift

readme: setup ## write README.md from nbs/index.ipynb
	@$(BIN)/python -m rlnb.cli.drift --write-readme
