# make quickstart   set everything up and run the main job: a language model fine-tuned privately, with its report
# make test         set everything up and run the checks that every change passes: at most 15 minutes on two idle cores
# make test-core    its tests without those of the methods; make test-methods: the tests of the methods alone
# make test-flower  the tests of federated runs over processes, with Flower in a set-up of its own: one or two minutes
# make test-deep    the same with every test: all mutations, planted bugs and combinations, whole runs on every engine
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FLOWER := .venv-flower
RUN := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

.PHONY: quickstart test test-core test-methods test-flower test-deep check docs setup format clean

# Threads that wait for each other sleep instead of spinning: a machine that is busy otherwise stays usable.
quickstart: $(VENV)/.quickstart
	OMP_WAIT_POLICY=PASSIVE $(BIN)/dpllm train quickstart train.output_dir=$(RUN)

test: check
	$(MAKE) --no-print-directory test-core
	$(MAKE) --no-print-directory test-methods

test-core: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not deep" --ignore tests/methods

test-methods: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not deep" tests/methods

test-flower: $(FLOWER)/.installed
	OMP_NUM_THREADS=1 $(FLOWER)/bin/python -m pytest -n 0 tests/methods/federated/test_flower.py -m "not deep"

test-deep: check $(FLOWER)/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal
	OMP_NUM_THREADS=1 $(FLOWER)/bin/python -m pytest -n 0 tests/methods/federated/test_flower.py

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

setup: $(VENV)/.installed

# torch goes first and by pip, so that the build named in constraints.txt is taken before anything else asks for one.
$(VENV)/.quickstart: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[quickstart]'
	touch $@

$(VENV)/.installed: $(VENV)/.quickstart
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[quickstart,dev]'
	# Its auditing file alone is wanted, which the tests compare with; its dependencies are gigabytes.
	$(BIN)/pip install --quiet --no-deps 'jax-privacy>=2.0,<3'
	touch $@

# Flower pins typer, rich, packaging and protobuf. This set-up has these versions, and all else from the first one.
$(FLOWER)/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(FLOWER)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
		> "$$($(FLOWER)/bin/python -c 'import site; print(site.getsitepackages()[0])')/first.pth"
	$(FLOWER)/bin/pip install --quiet --constraint constraints.txt --editable '.[flower]'
	touch $@

clean:
	rm -rf $(VENV) $(FLOWER) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
