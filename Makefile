# Every target works on a machine with nothing but Python 3.11 and pip. PY names the interpreter that makes the environment.
PY ?= python3
BIN := .venv/bin
.PHONY: install demo test test-fast test-slow test-long test-browser test-peers bench-peers docs lint clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PY) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/depthlaw demo

# Two threads in one small model slow it down, and every test that starts a process gives it one.
test test-fast test-slow test-long test-browser test-peers: export OMP_NUM_THREADS = 1

test: lint test-fast
	$(BIN)/python -m pytest -m 'engine and not slow and not gpu and not peers'
	$(BIN)/python -m pytest -n 2 -m 'browser and not slow'

test-fast: install
	$(BIN)/python -m pytest -n 2 -m 'not slow and not gpu and not peers and not engine and not browser'

test-slow: install
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'slow and not long and not engine'
	$(BIN)/python -m pytest -m 'slow and not long and engine'

test-long: install
	$(BIN)/python -m pytest -m long

# Installs nothing outside .venv: without a browser of the system it says what to install.
test-browser: install
	@command -v chromium || command -v chromium-browser || command -v google-chrome || command -v google-chrome-stable || \
		{ echo "no browser on the PATH: install one, such as Debian's package chromium, and run this again"; exit 1; }
	$(BIN)/python -m pytest -m browser

# Into a folder of their own, so that no other target can come to need them.
PEERS := .venv/peers

$(PEERS)/installed: .venv/installed pyproject.toml
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['peers'], sep='\n')" > .venv/peers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(PEERS) -r .venv/peers.txt
	touch $@

test-peers: $(PEERS)/installed
	PYTHONPATH=$(PEERS) $(BIN)/python -m pytest -m peers tests/peers

bench-peers: $(PEERS)/installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(PEERS) $(BIN)/python -m benchmarks.topologies
	OMP_NUM_THREADS=1 PYTHONPATH=$(PEERS) $(BIN)/python -m benchmarks.fits

# The pages of docs/ that are generated; a test says when they are out of date.
docs: install
	$(BIN)/typer depthlaw.platform.cli utils docs --name depthlaw --title "The commands" --output docs/cli.md

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
