# make demo: install and run the demo.  make test: install and run the tests.  make lint: look at the form of the code.
SHELL := /bin/bash
PYTHON := $(shell for python in python3.11 python3; do \
	$$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$python && break; done)
TORCH := $(shell sed -n 's/.*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml)
export UV_COMPILE_BYTECODE_TIMEOUT := 600

.PHONY: demo test lint .venv

demo: .venv/installed-cpu
	.venv/bin/rz demo

# Many processes share the cores: none of their threads may spin.
test: export OMP_WAIT_POLICY := PASSIVE
test: .venv/installed-test
	.venv/bin/pytest

lint: .venv/installed-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv: .venv/installed-test

.venv/bin/uv:
	@test -n "$(PYTHON)" || { echo "rz needs Python 3.11: install the packages python3.11 and python3.11-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check uv

# uv does not read pip's settings: a folder of wheels that holds torch for CPU is passed on, else uv knows where it is.
install = @echo "Installing rz[$(1)] and what it needs, about 4 GB, into .venv"; \
	if compgen -G "$$PIP_FIND_LINKS/torch-$(TORCH)+cpu-*.whl" >/dev/null; \
	then from=(--find-links "$$PIP_FIND_LINKS"); else from=(--torch-backend=cpu); fi; \
	.venv/bin/uv pip install --compile-bytecode --python .venv/bin/python "$${from[@]}" -e '.[$(1)]'

comma := ,

.venv/installed-cpu: .venv/bin/uv pyproject.toml
	$(call install,cpu)
	@touch $@

.venv/installed-test: .venv/bin/uv pyproject.toml
	$(call install,cpu$(comma)test)
	@touch .venv/installed-cpu $@
