# Every target works on a machine with nothing but Python 3.11 and pip. PY names the interpreter that makes the environment.
PY ?= python3
BIN := .venv/bin
.PHONY: install demo test test-fast test-slow lint clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PY) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/depthlaw demo

test: lint
	$(BIN)/python -m pytest -m 'not slow and not gpu'

test-fast: install
	$(BIN)/python -m pytest -m 'not slow and not gpu and not engine'

test-slow: install
	$(BIN)/python -m pytest -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
