# make demo    fetch the default model and let it answer a question
# make test    linters, type checker and all tests
# make lint    linters and type checker alone
# make clean   remove the virtual environment, caches and build products

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test lint clean

# The first of these that is new enough and can make virtual environments is used.
PYTHON ?= python3 python3.11 python3.12 python3.13 python3.14
VENV := .venv
BIN := $(VENV)/bin
QUESTION ?= Explain in two sentences why leaves are green.
PYTEST_ARGS ?=
export QUESTION

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/.installed
	@echo "Question: $$QUESTION"
	@$(BIN)/minivllm chat "$$QUESTION" --max-tokens 128 --stats

# The models in the tests are small: more threads mostly wait for each other, ten times longer where
# something else runs beside them.
test: export OMP_NUM_THREADS := $(or $(OMP_NUM_THREADS),1)
test: lint
	$(BIN)/python -m pytest --durations=10 $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.installed: EXTRAS :=
$(VENV)/.installed-test: EXTRAS := [test]

# pip says a great deal; what takes time are the downloads and the installation.
$(VENV)/.installed $(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing minivllm$(EXTRAS) into $(VENV)'
	@PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
	  $(BIN)/python -m pip install -c constraints.txt -e '.$(EXTRAS)' \
	  | awk '/^ *(Downloading|Building|Installing)/ && !/metadata/ { print; fflush() }'
	@touch $@

$(BIN)/python:
	@for python in $(PYTHON); do \
	  if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	      2>/dev/null; then \
	    echo "Creating $(VENV) with $$("$$python" --version)"; \
	    exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo 'error: none of these is Python 3.11 or newer with the module venv: $(PYTHON)' >&2; \
	echo '       install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3' >&2; \
	exit 1
