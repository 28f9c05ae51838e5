# The two commands: `make train` runs the main job, `make test` the tests. Each sets up first (skipped when up to date).
# PYTHON=… picks the Python the environment is made of; TORCH=cpu|cuda picks torch's build.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: docs train test test-units test-ranks test-again test-setup test-all mutants check format size lock setup setup-train clean

# Without the tools of the tests: what training needs and no more.
train: setup-train
	@$(BIN)/tilemesh calibrate --if-missing
	@$(BIN)/tilemesh train

# The rank tests run even when a unit test failed; one summary closes both.
test: setup
	@$(BIN)/python scripts/test.py

test-units: setup
	@$(BIN)/python scripts/test.py units

test-ranks: setup
	@$(BIN)/python scripts/test.py ranks

# Those that failed in the last run, one after the other.
test-again: setup
	@$(BIN)/python scripts/test.py failed

# The set-up with all that can go wrong, and the real one, killed half way and moved: minutes long, so apart.
test-setup: setup
	@$(BIN)/python scripts/test.py setup

test-all: setup
	@$(BIN)/python scripts/test.py --all

# Small faults in the source, one at a time, and whether a test notices: a quarter of an hour on sixteen cores.
mutants: setup
	@$(BIN)/python tests/mutants/mutants_run.py -n $$(nproc)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Lines of each room beside its budget, and the change since the last release.
size: setup
	@$(BIN)/python scripts/size.py

# The documents and the Python API as one static site; a link that leads nowhere is an error. Installs the extra `docs`.
docs: setup
	@$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r locks/docs.txt
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Versions and hashes of all that `make` installs, after pyproject.toml or constraints.txt changed. UPGRADE=1: the newest.
lock: setup
	@$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r locks/lock.txt
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/lock.py

setup:
	@$(PYTHON) scripts/setup.py

setup-train:
	@$(PYTHON) scripts/setup.py --purpose train

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
