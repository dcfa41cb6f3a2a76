# Needs python3 (3.11 or newer), its venv module, and make. Everything is installed into .venv.
PYTHON ?= python3
# Extra pytest arguments: make test ARGS="-k config"
ARGS ?=
# Processes that run tests side by side, with one thread each: one more than the cores of a small machine, because some
# tests wait for processes of theirs.
WORKERS ?= 3

BIN := .venv/bin
# -qq keeps pip's errors and drops its warnings about mirrors that happen to be configured on a machine.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DELETE_ON_ERROR:
.PHONY: help demo test lint bench

help:
	@echo "make demo    a small end-to-end tour on this machine"
	@echo "make test    run the tests              (ARGS=... goes to pytest)"
	@echo "make lint    style, types, import order, file lengths, docs"
	@echo "make bench   list the benchmark commands"

demo: .venv/installed-run
	@$(BIN)/python tools/demo.py

test: .venv/installed-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: .venv/installed-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/check_length.py
	@$(BIN)/python tools/check_docs.py

bench: $(BIN)/pip
	@$(BIN)/python tools/list_benches.py

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "openwafer needs Python 3.11 or newer, and '$(PYTHON)' is not: try make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv

.venv/installed-run: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing openwafer into .venv (PyTorch is large: some minutes the first time)"
	@$(PIP_INSTALL) -e '.[serve]'
	@touch $@

.venv/installed-dev: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing openwafer and its test tools into .venv (PyTorch is large: some minutes the first time)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch .venv/installed-run $@
