# make quickstart   set everything up and run the main job: a language model fine-tuned privately, with its report
# make test         set everything up and run the checks that every change passes: about 20 minutes on two idle cores
# make test-core    its tests without those of the methods; make test-methods: the tests of the methods alone
# make test-random  the same tests in a random order: none may depend on another
# make test-deep    the same with every test: all mutations, planted bugs and combinations, whole runs on every engine
# make coverage     which lines and branches of the core its tests reach; below 90 % it fails
# make lane         the nets and the quickstart with the oldest versions that pyproject.toml allows, or LANE=newest
# make dist         wheel and source distribution in dist/, checked
# make lock         the newest versions into requirements*.lock; UPGRADE="--upgrade-package NAME" raises one alone
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS := 2
RUN := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)
# Bytecode of the tests is kept even where the environment forbids it: collecting them then takes half of the time.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest

.PHONY: quickstart test test-core test-methods test-random test-deep coverage check docs setup lane dist lock format clean

# Threads that wait for each other sleep instead of spinning: a machine that is busy otherwise stays usable.
quickstart: $(VENV)/.quickstart
	OMP_WAIT_POLICY=PASSIVE $(BIN)/dpllm train quickstart train.output_dir=$(RUN)

test: check
	$(MAKE) --no-print-directory test-core
	$(MAKE) --no-print-directory test-methods

test-core: setup
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "not deep" --ignore tests/methods

test-methods: setup
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "not deep" tests/methods

test-random: setup
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/randomly pytest-randomly
	PYTHONPATH=build/randomly $(PYTEST) -n $(WORKERS) --dist loadfile -m "not deep"

test-deep: check
	$(PYTEST) -n $(WORKERS) --dist loadfile
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutations

coverage: setup
	mkdir -p build
	$(BIN)/coverage erase
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -n $(WORKERS) --dist loadfile -m "not deep" \
		--ignore tests/methods
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory docs

# The documentation as a site, in build/site. A warning is an error. The variable silences the theme's notice about MkDocs 2.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/format_tables.py

setup: $(VENV)/.installed

# torch goes first, in the build that the index offers for this machine: the locks do not list it (pyproject.toml).
$(VENV)/.quickstart: pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.installed: $(VENV)/.quickstart requirements-dev.lock
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement requirements-dev.lock
	# Its auditing file alone is wanted, which the tests compare with; its dependencies are gigabytes.
	$(BIN)/pip install --quiet --no-deps 'jax-privacy>=2.0,<3'
	touch $@

# First the developers' versions, then those of the quickstart among them.
UPGRADE ?= --upgrade
UV := build/uv/bin/uv
COMPILE := $(UV) pip compile --quiet $(UPGRADE) --universal --python-version 3.11 --fork-strategy fewest \
	--prerelease disallow --generate-hashes --no-annotate --no-emit-package torch --custom-compile-command 'make lock' \
	--extra quickstart pyproject.toml

lock:
	$(PYTHON) -m venv build/uv
	build/uv/bin/pip install --quiet uv
	$(COMPILE) --constraint constraints.txt --extra dev --output-file requirements-dev.lock
	$(COMPILE) --constraint constraints.txt --constraint requirements-dev.lock --output-file requirements.lock

# The lower bounds of the required packages as constraints; the newest of everything else. pyproject.toml's table
# for uv says what torch requires without CUDA, which is for the locks alone (--no-config).
LANE ?= oldest
LANE_VENV := build/lane-$(LANE)-$(notdir $(PYTHON))
LANE_BIN := $(LANE_VENV)/bin
LANE_INSTALL := $(LANE_BIN)/uv pip install --quiet --no-config --python $(LANE_BIN)/python

lane:
	$(PYTHON) -m venv $(LANE_VENV)
	$(LANE_BIN)/pip install --quiet uv
	sed -nE 's/^    "([a-z0-9-]+)>=([0-9.]+).*/\1==\2/p' pyproject.toml > build/oldest.txt
	: > build/newest.txt
	$(LANE_INSTALL) --constraint build/$(LANE).txt \
		--editable '.[quickstart,trl,metrics,excel]' jsonschema pytest pytest-xdist hypothesis
	$(LANE_INSTALL) --no-deps 'jax-privacy>=2.0,<3'
	OMP_NUM_THREADS=1 $(LANE_BIN)/pytest -n $(WORKERS) --dist loadfile -m "not deep" \
		tests/reference tests/invariant tests/zoo tests/privacy tests/mechanism
	OMP_WAIT_POLICY=PASSIVE $(LANE_BIN)/dpllm train quickstart train.output_dir=$(RUN)
	$(LANE_BIN)/dpllm verify $(RUN)

dist:
	$(PYTHON) -m venv build/dist
	build/dist/bin/pip install --quiet build twine check-wheel-contents
	rm -rf dist
	build/dist/bin/python -m build
	build/dist/bin/twine check --strict dist/*
	build/dist/bin/check-wheel-contents dist/*.whl

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
