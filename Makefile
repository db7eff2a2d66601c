# Each target does its own set-up in .venv; Python 3.10 or newer and git are all it needs.
PYTHON ?= python3
BIN := .venv/bin
MODEL ?=
ARGS ?=
CUDA_SOURCES := cuda_src/*/*.cu cuda_src/include/*.cuh cuda_src/include/*/*.cuh tests/emulation/*.h tests/emulation/*.cc
RANDOMISED := tests/engine/test_core_simulation.py tests/engine/gguf/test_gguf_mutations.py tests/app/test_schemathesis.py
KERNEL_TESTS := $(wildcard $(addprefix tests/gpu/test_,ops_gpu.py matmul*.py attention*.py encoder*.py rope*.py sampling*.py token*.py))

# Servers under test start many processes, each of which would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-fast test-long test-clients check format eval test-gpu test-emulated sanitize-gpu bench-gpu image-check docs docs-serve lock clean prove-batches

serve: .venv/.runtime
	@exec $(BIN)/tessera serve $(MODEL) $(ARGS)

test: .venv/.dev
	$(BIN)/python -m pytest -m "not gpu" --numprocesses 2 --dist loadfile $(ARGS)

# What a change most likely breaks, in under a minute on 2 cores.
test-fast: .venv/.dev
	$(BIN)/python -m pytest -m "not gpu and not slow" --numprocesses 2 --dist loadfile -q $(ARGS)

# The randomised tests with many more inputs.
test-long: .venv/.dev
	TESSERA_FUZZ_EXAMPLES=1000 $(BIN)/python -m pytest --worlds 5000 --gguf-mutations 50000 --timeout 0 $(or $(ARGS),$(RANDOMISED))

# Real clients from npm and PyPI, in folders of their own, against a server on the loopback.
test-clients: .venv/.dev tests/clients/node_modules/.installed .venv-clients/.installed
	$(BIN)/python -m pytest tests/clients -q $(ARGS)

# A million batch lines with kill -9 of the server and its engine in between: most of an hour. ARGS='--lines 20000': a minute.
prove-batches: .venv/.dev
	$(BIN)/python -m tests.batches.million $(ARGS)

eval: .venv/.dev
	$(BIN)/python -m tests.evaluation $(ARGS)

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	$(BIN)/clang-format --dry-run --Werror $(CUDA_SOURCES)

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CUDA_SOURCES)

test-gpu: .venv/.dev
	TESSERA_REQUIRE_GPU=1 $(BIN)/python -m pytest -m gpu -p tests.gpu.launched $(ARGS)

# The same on a machine without a GPU, which runs the kernels' sources with g++: thousands of times slower, so choose
# some with ARGS, for example 'tests/gpu/test_rope_gpu.py -k bfloat16'. With EMULATED_RACES=1 it also finds races in
# shared memory, whatever the order in which threads run; with EMULATED_ARCH=100a portable kernels run where sm_90a has
# its own.
test-emulated: .venv/.dev
	TESSERA_EMULATED=1 $(BIN)/python -m pytest -m gpu --numprocesses 2 --timeout 0 $(or $(ARGS),$(KERNEL_TESTS))

# What the kernels read and write, under NVIDIA's compute-sanitizer (from the CUDA toolkit); ARGS choose tests.
sanitize-gpu: .venv/.dev
	for tool in memcheck racecheck; do \
		TESSERA_REQUIRE_GPU=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
			$(BIN)/python -m pytest -m gpu -q $(or $(ARGS),$(KERNEL_TESTS)) || exit 1; \
	done

bench-gpu: .venv/.dev
	$(BIN)/python -m tests.bench $(ARGS)

image-check: .venv/.dev
	$(BIN)/python -m tests.image_steps $(ARGS)

tests/clients/node_modules/.installed: tests/clients/package.json
	cd tests/clients && npm install --no-audit --no-fund --no-package-lock
	@touch $@

.venv-clients/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --requirement $<
	@touch $@

# The site, in build/site; a link that leads nowhere is an error. Tables and pictures that are committed come first.
docs: .venv/.dev
	$(BIN)/python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

clean:
	rm -rf .venv .venv-clients tests/clients/node_modules .mypy_cache .ruff_cache .pytest_cache build dist

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
	$(LOCK) pyproject.toml --output-file requirements.lock
	$(LOCK) pyproject.toml --group dev --output-file requirements-dev.lock
