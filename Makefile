# Every target sets up what it needs in .venv; a fresh clone needs only python3, make and gcc.
#   make demo     collect, train and evaluate the example       make lint    ruff and mypy
#   make test     what a change can break: of products, deaths and storms a sample (ARGS="-k table", JOBS=8)
#   make test-all all tests: also benchmark runs, examples, storms and exhaustive loops
#   make test-emulated  the kernels' tests on the code that Triton compiles for a GPU, executed on the host
#   make rdma-check  one-sided reads and UCX over InfiniBand's verbs, in virtual machines (Debian, x86_64; 20 to 50 minutes)
#   make docs     the documentation site, docs/_build            make clean   remove builds and caches, not .venv
#   make bench    a benchmark (ARGS="run single-server")        make report  a page and plots of what was measured
#   make graph-serving  train and serve a GraphSAGE on the call graph of the installed Python sources
#   make peers    other libraries, to be measured beside ours, and tested with (ARGS=".peers torchrl tianshou d3rlpy rllib")
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.gear-loader-ready
JOBS := 3  # one more than two cores: many tests wait for processes that they have started
# Beside the machine code that numba keeps: make clean removes both.
LOOPS := gear_loader/__pycache__/.loops-compiled
# Bytecode is kept: else each of the tests' processes, of which there are hundreds, compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo graph-serving test test-all test-emulated rdma-check lint format docs bench peers report clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

# Written last, so that an interrupted set-up starts again; an existing .venv is kept and completed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Gear Loader needs Python 3.10 or newer, \
	found " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(RUN) examples/decision_transformer.py $(ARGS)

graph-serving: $(READY)
	$(RUN) examples/graph_serving $(ARGS)

# Once, on two cores; else each of the tests' workers compiles all loops, at the same time.
$(LOOPS): $(READY) tests/tools/compile_loops.py gear_loader/warmup.py $(wildcard gear_loader/storage/operations/*.py) gear_loader/storage/inline.py $(wildcard gear_loader/native/*.py)
	$(RUN) tests/tools/compile_loops.py
	@mkdir -p $(@D) && touch $@

test: $(LOOPS)
	$(RUN) -m pytest -n $(JOBS) --dist worksteal -m "not long" $(ARGS)

test-all: $(LOOPS)
	$(RUN) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-emulated: $(READY)
	$(RUN) -m pytest -n $(JOBS) --dist worksteal -m "not long" --emulated installed $(ARGS) \
		tests/tools/emulation tests/kernels tests/selection/test_device_priorities.py

rdma-check: $(READY)
	$(RUN) tests/tools/rdma/machine.py $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Built afresh each time (-E -a), so that a warning, which is an error (-n -W), is not shown only once.
docs: $(READY)
	$(RUN) -m sphinx -E -a -n -W --keep-going -q docs docs/_build $(ARGS)
	@echo Written: docs/_build/index.html

bench: ARGS ?= run single-server
bench: $(READY)
	$(RUN) -m benchmarks $(ARGS)

peers:
	bash benchmarks/peers/make.sh $(ARGS)

report: $(READY)
	$(RUN) -m benchmarks report $(ARGS)

clean:
	rm -rf build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis lightning_logs
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
