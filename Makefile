# make demo   24 small tasks in isolated, warm, verified sandboxes: table and plot
# make demo-trl  GRPO with TRL on the CPU, a tiny model in local sandboxes: log, rewards, plot
# make test   the test suite; what needs an extra that is not there is skipped
# make test-trl  the tests of the TRL integration, with trl and torch
# make test-cluster  the tests that need a Kubernetes, on one that is built and started here (root)
# make cluster, make cluster-down  that Kubernetes by itself
# make lint   ruff, mypy, import rules
# make clean  forget the virtual environment
#
# Needs Python 3.11 or later with venv. Everything that is installed goes into .venv; runs write to the user's state and
# cache directories (docs/configuration.md). A C compiler that links statically is used where there is one. Safe to repeat: only what is missing is installed.

VENV ?= .venv
PYTHON ?=
ARGS ?=
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
MADE_OF := pyproject.toml setup.py $(wildcard build_backend/*.py)

# With this set, importing large packages takes seconds longer each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-trl test test-trl test-cluster cluster cluster-down lint clean
help:
	@sed -n 's/^# //p' Makefile | head -8

demo: $(VENV)/.have-demo
	$(VENV)/bin/rlsandbox run --tasks demo --policy canonical --group-size 2 \
	    --require-coverage 1 --require-reward 1 --plot demo.png $(ARGS)

demo-trl: $(VENV)/.have-trl
	$(PY) -W ignore::FutureWarning examples/trl_grpo.py $(ARGS)

test: $(VENV)/.have-dev
	$(PY) -m pytest $(ARGS)

test-trl: $(VENV)/.have-dev $(VENV)/.have-trl
	$(PY) -m pytest tests/integration/trl tests/unit/test_trl_parallel.py $(ARGS)

test-cluster: $(VENV)/.have-dev $(VENV)/.have-cluster
	RLSANDBOX_TEST_CLUSTER=$(if $(RLSANDBOX_TEST_KUBECONFIG),0,1) $(PY) -m pytest tests/cluster $(ARGS)

cluster: $(VENV)/.have-dev
	$(PY) -m tests.cluster up $(ARGS)

cluster-down: $(VENV)/.have-dev
	$(PY) -m tests.cluster down

lint: $(VENV)/.have-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy integrations/rlsandbox_trl
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV)

$(PY):
	@for python in $(PYTHON) python3.13 python3.12 python3.11 python3.14 python3; do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "$$python -m venv $(VENV)"; exec "$$python" -m venv $(VENV); \
	    fi; \
	done; \
	echo "no Python 3.11 or later with venv: install it (Debian: apt install python3 python3-venv)" >&2; \
	echo "or name it: make PYTHON=/path/to/python3" >&2; exit 1

# A venv made without pip (by uv) gets it.
$(VENV)/.have-%: $(PY) $(MADE_OF)
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip --default-pip >/dev/null
	@echo "installing what is missing into $(VENV)"
	$(PIP) -e '.[$(EXTRA_$*)]'
	@touch $@

EXTRA_demo := plots
EXTRA_trl := trl,plots
EXTRA_dev := dev
EXTRA_cluster := kubernetes
