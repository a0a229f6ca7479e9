# Every target first makes .venv, once; again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready

# Test processes at the same time: ranks often wait, so that four end sooner than three, also on two cores. Each file or
# folder of tests/conftest.py runs in one process, the slowest first, and those that mostly wait in turn with the others.
JOBS   ?= 4
RXE    ?=  # options of the two hosts with RDMA NICs
TESTS  ?=  # options of pytest for the tests on clusters
WHAT   ?=  # what is installed for these: slurm, images, ray, mpich, accelerate; else all of it
SPLIT  := --dist loadfile --no-loadscope-reorder

# Whose GPUs: an extra of pyproject.toml, cuda, cuda12 or rocm, or several with commas between.
GPU    ?= cuda

# mpirun, xvcomm and torchrun as started by tests and examples are the environment's own.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

# Images for containers often set it; then each process that tests start would compile xvcomm's modules again.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo demo-hosts test test-slow test-gpu test-rdma test-clusters test-examples torch-suite check bench bench-hosts bench-faults bench-rdma bench-gpu docs dist clean

# Here ranks have arrays in host memory, also on a machine with GPUs. Tests that want another device say so.
demo test test-slow test-rdma test-clusters bench bench-rdma: export XVCOMM_DEVICE := host

help:
	@awk -F ' *## *' '/^[a-z-]+:.*##/ { sub(/:.*/, "", $$1); printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Debian ships venv without ensurepip unless python3-venv is installed; there pip installs itself from outside.
$(PY):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "xvcomm needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(PY) install pip; }

# Python compiles a module when it is first imported. pip would compile all 11,000, which takes longer than the rest of its work.
$(READY): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test,dev]'
	@touch $@

$(READY)-$(GPU): $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev,$(GPU)]'
	@touch $@

$(READY)-examples: $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev,examples]'
	@touch $@

$(READY)-docs: $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev,docs]'
	@touch $@

demo: $(READY)   ## train a small language model over two islands on this machine
	$(VENV)/bin/xvcomm run -n 4 --islands cuda:2,rocm:2 -- examples/train.py --check

demo-hosts: $(READY)   ## train over two hosts, network namespaces of this machine, while a link is cut; needs root
	$(PY) examples/hosts_demo.py

test: $(READY)   ## every test that is not slow
	$(PY) -m pytest -m "not slow" -n $(JOBS) $(SPLIT)

test-slow: $(READY)   ## the slow tests too: hundreds of simulated ranks, long runs
	$(PY) -m pytest

test-gpu: $(READY)-$(GPU)   ## the tests that need GPUs; GPU=cuda12 or rocm if not cuda
	status=0; $(PY) -m pytest -rs tests/hardware || status=1; \
	$(PY) -m pytest -rs xvcomm/testing -k "cuda or rocm" || status=1; exit $$status

# A few tests first compile the kernels on this machine. The small hosts, which read its files, would take minutes for that. At the
# end one runs here that kills such hosts.
test-rdma: $(READY)   ## the tests of RDMA, on two small hosts with Soft-RoCE that are built once, in 10 to 20 minutes
	$(PY) -m pytest -q -p no:cacheprovider -m "not rdma" -k "trials or right_bytes or in_order or short_sums" \
	  tests/rdma/test_rdma_direct.py tests/rdma/test_rdma_trials.py tests/conformance/test_rocm.py
	$(PY) tests/shims/rxe/run.py $(RXE) -- $(abspath $(PY)) -m pytest -rs -m rdma -p no:cacheprovider tests/rdma
	$(PY) -m pytest -q -rs -p no:cacheprovider tests/rdma/test_rdma_power.py

test-clusters: $(READY)   ## the tests on SLURM, which root installs, and Ray, in an environment of its own; 10 to 20 minutes
	$(PY) tests/clusters/install.py $(WHAT)
	WITH_CLUSTERS=1 $(PY) -m pytest -rs -p no:cacheprovider tests/clusters $(TESTS)

test-examples: $(READY)-examples   ## programs of others, unchanged: Hugging Face's Trainer and accelerate
	$(PY) -m pytest -rs tests/adapters/torch/test_torch_transformers.py

# What gloo passes, xvcomm must pass. The runs that fail are looked at in the comparisons; gloo's own failures are no matter.
torch-suite: SUITE := $(PY) tests/adapters/torch_suite/run.py
torch-suite: OUT := build/torch_suite
torch-suite: $(READY)   ## torch's own tests of process groups, all of them, on gloo and xvcomm with 2 and 4 ranks
	mkdir -p $(OUT)
	for backend in gloo xvcomm-as-gloo xvcomm; do for ranks in 2 4; do \
	  rm -f $(OUT)/$$backend-$$ranks.json; \
	  $(SUITE) --backend $$backend --ranks $$ranks --out $(OUT)/$$backend-$$ranks.json || :; \
	done; done
	$(SUITE) --publish $(foreach b,gloo xvcomm-as-gloo xvcomm,$(OUT)/$(b)-2.json $(OUT)/$(b)-4.json)
	status=0; for backend in xvcomm-as-gloo xvcomm; do for ranks in 2 4; do \
	  $(SUITE) --compare $(OUT)/gloo-$$ranks.json $(OUT)/$$backend-$$ranks.json || status=1; \
	done; done; exit $$status

check: $(READY)   ## ruff, mypy strict, import-linter
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check --quiet
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(READY)   ## host memory figures beside Gloo, OpenMPI and memcpy
	$(PY) benchmarks/host.py --out docs/figures

bench-hosts: $(READY)   ## figures between hosts, network namespaces of this machine, beside Gloo, OpenMPI and C; needs root
	$(PY) benchmarks/hosts.py --out docs/figures

bench-faults: $(READY)   ## how soon ranks notice losses, shrink, and name who never called, on two network namespaces; needs root
	$(PY) benchmarks/faults.py --out docs/figures

bench-rdma: $(READY)   ## figures of RDMA between two small hosts with Soft-RoCE, beside perftest and TCP
	$(PY) benchmarks/rdma.py --out docs/figures

bench-gpu: $(READY)-$(GPU)   ## figures of all NVIDIA GPUs here beside NCCL, Gloo and raw copies
	$(PY) benchmarks/gpu.py --out docs/figures

# The variable silences an advertisement of mkdocs-material for its successor, which is no warning about these pages.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY)-docs   ## write the generated tables of docs/, and build the site into build/site; a warning fails
	$(PY) docs/generate.py
	$(VENV)/bin/mkdocs build --strict

dist: $(READY)-docs   ## build the source archive and the wheel into dist/, and check them as PyPI does
	rm -rf dist
	$(PY) -m build --no-isolation
	$(VENV)/bin/twine check --strict dist/*

clean:   ## remove the environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
