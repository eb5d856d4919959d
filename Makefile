# `make demo` and `make test` need python3 and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

# The tests start hundreds of processes: keep compiled files for all of them.
export PYTHONDONTWRITEBYTECODE :=

# Seconds that `make fuzz` gives to each parser, and which of them (all): make fuzz FUZZ_SECONDS=600 FUZZ='zip pickle'
FUZZ_SECONDS ?= 60
FUZZ ?=
# Mutants of each format that `make fuzz` gives to ckpttool and to the format's own reader.
FUZZ_MUTANTS ?= 20000

# Options of `make gpu` and of `make gpu-bundle`, and the folder that the second fills.
GPU_ARGS ?=
GPU_BUNDLE ?= gpu_bundle
GPU_BUNDLE_ARGS ?= --python 3.12

# Test modules of `make quick`: those that take seconds. `make test` runs all.
QUICK := algorithms behind check checkpoint_state cli comparison convert decorations diff documents drawing \
	format_npz format_tensor_bundle forms golden hdf5_answer inspect knowledge language layers layouts \
	limits mapping_inert nestings network newcomer object_graph optimizer_forms plugins quiet reference_scores rule_files \
	rule_parts rules samples schemas sidecar sniff solver source stacking statistics stats strips structure \
	training_curve undo variables wire_npy wire_pickle wire_protobuf wire_sstable wire_writers wire_zip \
	writing

.PHONY: demo test quick lint types tests golden nightly bench gpu gpu-bundle fuzz docs site dist clean

# The demo needs no framework to look and convert; it plays and verifies with both.
demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: lint types tests

# The development loop: formatting, and the tests that need no framework.
quick: lint
	$(BIN)/pytest -n 2 -q -m "not torch and not tensorflow and not environment and not corpus and not slow and not long" \
		$(QUICK:%=tests/test_%.py)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

tests: $(VENV)/.installed
	$(BIN)/pytest -n auto

# Writes the texts that people see (tests/golden) as they are now: review the difference.
golden: $(VENV)/.installed
	$(BIN)/pytest -n auto --golden -m ""

# What takes minutes and changes with few commits: tests of many cases (tests/nightly.py), all cells of docs/everyday.md against the recorded ones, the
# agents of the RL libraries that are installed, every kind of layer with every hyper-parameter in both frameworks, and
# the pairs of models of docs/model_pairs.md; then how the time of every command grows with the tensors.
nightly: $(VENV)/.installed
	$(BIN)/pytest -n auto -m "slow or hypothesis" --hypothesis-profile explore
	$(BIN)/python -m tests.everyday --check
	$(BIN)/python -m tests.everyday.code_share
	$(BIN)/python -m tests.agent_truth
	$(BIN)/python -m tests.layer_grid
	$(BIN)/python -m tests.model_pairs --check
	$(BIN)/python -m benchmarks.scaling tensors=1000,10000,100000

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

# All checks and measurements on one device; needs no preparation: make gpu GPU_ARGS='--device cpu'
# Where the folder $(GPU_BUNDLE) exists, whatever this machine's Python lacks is installed from it, without a network.
gpu:
	@if [ -f "$(GPU_BUNDLE)/manifest.json" ]; then \
		$(PYTHON) -m benchmarks.gpu.bundle "$(GPU_BUNDLE)" --install build/gpu_site && \
		PYTHONPATH="$(CURDIR):$(CURDIR)/build/gpu_site" $(PYTHON) -m benchmarks.gpu $(GPU_ARGS); \
	elif [ -x $(BIN)/python ]; then $(BIN)/python -m benchmarks.gpu $(GPU_ARGS); \
	else $(PYTHON) -m benchmarks.gpu $(GPU_ARGS); fi

# Collects that folder: make gpu-bundle GPU_BUNDLE_ARGS='--python 3.12 --platform manylinux_2_28_x86_64'
gpu-bundle: $(VENV)/.installed
	$(BIN)/python -m benchmarks.gpu.bundle "$(GPU_BUNDLE)" $(GPU_BUNDLE_ARGS)

fuzz: $(VENV)/.installed
	$(PIP) install --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m tests.hostile.fuzz --seconds $(FUZZ_SECONDS) $(FUZZ)
	$(BIN)/python -m tests.hostile.differential --mutants $(FUZZ_MUTANTS)

# Generate the reference pages, run all pages to update their output, and make the pictures from real runs.
docs: $(VENV)/.installed
	$(BIN)/python docs/generate.py
	$(BIN)/python -m docs.screens
	$(BIN)/python -m docs.pictures
	$(BIN)/python -m docs.recordings

site: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# constraints.txt holds the versions that were tested; torch among them must be the CPU build there is.
$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt --editable '.[all,dev,docs,gs,hf]'
	# Keras 2, with which tests compare, requires the full tensorflow, which conflicts with tensorflow-cpu. It lies
	# in a folder of its own, which tests/conftest.py adds to the path: the environment itself stays consistent.
	$(PIP) install --constraint constraints.txt --no-deps --upgrade --target $(VENV)/keras2 tf_keras
	$(PIP) --quiet uninstall --yes tf_keras  # where an earlier Makefile installed it
	$(PIP) check
	# pip does this for installed packages only; without it the first start compiles.
	$(BIN)/python -m compileall -q ckpttool
	touch $@

# Needs no framework, neither to build nor to install: pip install dist/*.whl
dist:
	$(PYTHON) -m venv build/dist
	build/dist/bin/pip --disable-pip-version-check --quiet install hatchling
	build/dist/bin/python -m hatchling build -d dist

clean:
	rm -rf $(VENV) demo_out build dist *.egg-info
