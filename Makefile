# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
TORCH_VERSION := 2.13.0
# Where your package index has no CPU build of torch, name PyTorch's CPU wheel index here (saves about 2 GB).
TORCH_CPU_INDEX ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PYTEST_ARGS ?=

.PHONY: setup setup-dev demo test lint bench proto clean

setup: .venv/.runtime
setup-dev: .venv/.dev

.venv/.runtime: requirements.lock pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "Moorage needs Python 3.11 or newer: install it, or set PYTHON=/path/to/python"; exit 1; }
	@echo "setting up .venv with $(PYTHON) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then \
		$(PIP) install "torch==$(TORCH_VERSION)"; \
	else \
		$(PIP) install "torch==$(TORCH_VERSION)+cpu" $(if $(TORCH_CPU_INDEX),--extra-index-url $(TORCH_CPU_INDEX)) 2>/dev/null \
		|| { echo "no CPU build of torch $(TORCH_VERSION) on this index: taking the default build"; \
		     $(PIP) install "torch==$(TORCH_VERSION)"; }; \
	fi
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e . 2>/dev/null || $(PIP) install --no-deps -e .
	@touch $@

.venv/.dev: .venv/.runtime requirements-dev.lock
	@$(PIP) install -r requirements-dev.lock
	@touch $@

demo: setup
	$(BIN)/moorage demo

test: setup-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p moorage.sessions -p moorage.engine -p moorage.kernels -p moorage.prefix_cache -p moorage.tools_bridge
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python benchmarks/resume.py --json -

proto: setup-dev
	$(BIN)/python sessions/proto/generate.py

clean:
	rm -rf .venv build dist *.egg-info
