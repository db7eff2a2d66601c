# Each target does its own set-up in .venv; Python 3.10 or newer and git are all it needs.
PYTHON ?= python3
BIN := .venv/bin
MODEL ?=
ARGS ?=
# Four processes on two cores, since tests wait for servers much of their time. Each process collects all tests:
# those of tests/gpu, which are none without a GPU, would take it seconds.
PYTEST = $(BIN)/python -m pytest --ignore tests/gpu --numprocesses 4 --dist loadfile
CUDA_SOURCES := cuda_src/*/*.cu cuda_src/include/*.cuh cuda_src/include/*/*.cuh tests/emulation/*.h tests/emulation/*.cc
RANDOMISED := tests/engine/core/test_core_simulation.py tests/engine/speculation/test_same_tokens.py tests/engine/gguf/test_gguf_mutations.py tests/app/openapi/test_schemathesis.py
KERNEL_TESTS := $(wildcard tests/gpu/ops/test_*.py tests/gpu/products/test_matmul*.py $(addprefix tests/gpu/attention/test_,attention*.py encoder*.py rope*.py))
CLIENT_ENVIRONMENTS := $(patsubst tests/clients/requirements/%.txt,.venv-clients/%/.installed,\
	$(wildcard tests/clients/requirements/*.txt))

# Servers under test start many processes, each of which would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-fast test-thorough test-long test-clients simulate attack soak mutation check format eval eval-quantisation test-gpu test-emulated sanitize-gpu bench-gpu image-check docs docs-serve lock clean prove-batches prove-fine-tuning prove-gpu prove-ray simulate-routing chart

serve: .venv/.runtime
	@exec $(BIN)/tessera serve $(MODEL) $(ARGS)

# Within five minutes on two cores; ARGS='tests/e2e' chooses among all that need no GPU.
test: .venv/.dev
	$(PYTEST) -m "not gpu$(if $(ARGS),, and not thorough)" $(ARGS)

# All others: servers and their processes under faults, kernels compiled for every architecture and run on the CPU.
test-thorough: .venv/.dev
	$(PYTEST) -m "thorough and not gpu" $(ARGS)

# What a change most likely breaks.
test-fast: .venv/.dev
	$(PYTEST) -m "not gpu and not thorough and not slow" -q $(ARGS)

# The randomised tests with many more inputs.
test-long: .venv/.dev
	TESSERA_FUZZ_EXAMPLES=1000 $(BIN)/python -m pytest --worlds 5000 --gguf-mutations 50000 --timeout 0 $(or $(ARGS),$(RANDOMISED))

# Real clients from npm and PyPI, in folders of their own, against servers on the loopback; needs node. ARGS='-k Codex'
# chooses, ARGS=--record writes the table to docs/figures/clients.json. (guidellm alone downloads 3 GB: PyTorch.)
test-clients: .venv/.dev tests/clients/node_modules/.installed $(CLIENT_ENVIRONMENTS)
	$(BIN)/python -m pytest tests/clients -q $(ARGS)

# Histories of a server on virtual time with faults, one for each seed: ARGS='--seeds 1000000 --first 0'.
simulate: .venv/.dev
	$(BIN)/python -m tests.simulation $(ARGS)

# Routing policies on a thousand replicas with conversations, bursts and failures: ARGS='--replicas 100', --write for the figures.
simulate-routing: .venv/.dev
	$(BIN)/python -m tests.simulation.routing $(ARGS)

# The server under attack; exits with 1 if a promise of SECURITY.md is broken: ARGS='--requests 1000000 --parts fuzz'.
attack: .venv/.dev
	$(BIN)/python -m tests.attack $(ARGS)

# Hours of mixed load and attack, drawn as build/soak/*.svg: ARGS='--hours 2'.
soak: .venv/.dev
	$(BIN)/python -m tests.attack.soak $(ARGS)

# Changes of one module that no test notices: ARGS='tessera.engine.core.scheduler --tests tests/engine/core/test_core.py'.
mutation: .venv/.dev
	$(BIN)/python -m tests.mutation $(ARGS)

# A million batch lines with kill -9 of the server and its engine in between: most of an hour. ARGS='--lines 20000': a minute.
prove-batches: .venv/.dev
	$(BIN)/python -m tests.batches.million $(ARGS)

# The demonstration model learns to spell through the API, its process killed in between: minutes of CPU time.
prove-fine-tuning: .venv/.dev
	$(BIN)/python -m tests.fine_tuning $(ARGS)

# Two CPU replicas on Ray Serve, one killed under load, in an environment of its own: Ray is not among what tests need.
prove-ray: .venv-ray/.installed
	.venv-ray/bin/python -m tests.ray_serve $(ARGS)

.venv-ray/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --editable '.[ray]'
	@touch $@

eval: .venv/.dev
	$(BIN)/python -m tests.evaluation $(ARGS)

eval-quantisation: .venv/.dev
	$(BIN)/python -m tests.evaluation.quantisation $(ARGS)

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	$(BIN)/clang-format --dry-run --Werror $(CUDA_SOURCES)
	$(BIN)/python -m tests.supply_chain

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CUDA_SOURCES)

test-gpu: .venv/.dev
	TESSERA_REQUIRE_GPU=1 $(BIN)/python -m pytest -m gpu -p tests.gpu.launched $(ARGS)

# The same on a machine without a GPU, which runs the kernels' sources with g++: thousands of times slower, so choose
# some with ARGS, for example 'tests/gpu/attention/test_rope_gpu.py -k bfloat16'. With EMULATED_RACES=1 it also finds races in
# shared memory, whatever the order in which threads run; with EMULATED_ARCH=100a portable kernels run where sm_90a has
# its own.
test-emulated: .venv/.dev
	TESSERA_EMULATED=1 $(BIN)/python -m pytest -m gpu --numprocesses 2 --timeout 0 $(or $(ARGS),$(KERNEL_TESTS))
	$(if $(ARGS),,TESSERA_EMULATED=1 $(BIN)/python -m pytest --numprocesses 2 --timeout 0 tests/emulation)

# The GPU tests under NVIDIA's compute-sanitizer (from the CUDA toolkit): hours; ARGS='--workers 12 tests/gpu/ops/test_ops_gpu.py'.
sanitize-gpu: .venv/.dev
	for tool in memcheck initcheck synccheck racecheck; do $(BIN)/python -m tests.sanitizers $$tool $(ARGS) || exit 1; done

bench-gpu: .venv/.dev
	$(BIN)/python -m tests.bench $(ARGS)

# Every figure that is promised of a GPU, with a table of what is kept: ARGS='--minutes 9 --part GGUF'.
prove-gpu: .venv/.dev
	$(BIN)/python -m tests.bench.promises $(ARGS)

image-check: .venv/.dev
	$(BIN)/python -m tests.image_steps $(ARGS)

# The Helm chart, checked, and as plain manifests; needs helm.
chart:
	helm lint --strict deploy/kubernetes
	helm lint --strict deploy/kubernetes --values deploy/kubernetes/ci/everything-values.yaml
	{ echo "# Rendered from deploy/kubernetes with its default values, for kubectl apply without Helm: make chart."; \
		helm template tessera deploy/kubernetes; } > deploy/kubernetes.yml

tests/clients/node_modules/.installed: tests/clients/package.json
	cd tests/clients && npm install --no-audit --no-fund --no-package-lock
	@touch $@

# An environment for each client, because their dependencies exclude each other; uv makes one in seconds.
.venv-clients/uv/bin/uv:
	$(PYTHON) -m venv .venv-clients/uv
	.venv-clients/uv/bin/python -m pip install --quiet uv==0.13.9

.venv-clients/%/.installed: tests/clients/requirements/%.txt .venv-clients/uv/bin/uv .venv/bin/python
	.venv-clients/uv/bin/uv venv --quiet --clear --python $(BIN)/python .venv-clients/$*
	.venv-clients/uv/bin/uv pip install --quiet --python .venv-clients/$*/bin/python --requirement $<
	@touch $@

# The site, in build/site; a link that leads nowhere is an error. Tables and pictures that are committed come first.
docs: .venv/.dev
	$(BIN)/python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

clean:
	rm -rf .venv .venv-clients .venv-ray .venv-audit tests/clients/node_modules .mypy_cache .ruff_cache .pytest_cache build dist

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Tessera needs Python 3.10 or newer; choose one with PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/.runtime: .venv/bin/python requirements.lock pyproject.toml
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

.venv/.dev: .venv/.runtime requirements-dev.lock
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements-dev.lock
	@touch $@

# Versions and hashes of everything that is installed, for all Pythons and platforms; needs uv.
LOCK := uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --python-version 3.10
lock:
	$(LOCK) pyproject.toml --extra cuda --output-file requirements.lock
	$(LOCK) pyproject.toml --extra cuda --group dev --output-file requirements-dev.lock
