# Everything a fresh machine needs: `make quickstart`, then `make test`.
PYTHON ?= python3
VENV ?= .venv
# A CPU build of torch where the package index offers one under this version; override at will.
TORCH ?= torch==2.13.0
# A Python with torch for CUDA and Triton: the machine's own.
GPU_PYTHON ?= python3
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
MODELS := .cache/models
SMOLLM2 := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA3 := $(MODELS)/gemma-3-270m-Q4_K_M.gguf
ENGINE := .cache/smollm2.engine

.PHONY: help quickstart test test-all test-gpu test-gpu-all test-gpu-sanitizers test-sanitizers lint format bench-cpu native clean

help:
	@echo "make quickstart   install, fetch a small real model, build it, ask it a question"
	@echo "make test         the test suite, in two processes (some minutes on two cores)"
	@echo "make test-all     the heavy sweeps too"
	@echo "make test-gpu     tests that need an NVIDIA GPU (minutes; PyTorch, Triton and pytest of python3)"
	@echo "make test-gpu-all  with a real model too (PELTON_SMOLLM2_GGUF=FILE)"
	@echo "make test-gpu-sanitizers  every GPU kernel under compute-sanitizer's memcheck and racecheck"
	@echo "make test-sanitizers  the native library under AddressSanitizer and ThreadSanitizer"
	@echo "make lint         ruff, mypy, import-linter"
	@echo "make bench-cpu    Pelton beside llama.cpp on the same files"
	@echo "make native       the native library only, in place (for development)"

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard src/pelton/kernels/csrc/*)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip
	$(PIP) install -q "$(TORCH)"
	$(PIP) install -q -e ".[build,serve]"
	$(PY) -m compileall -q src/pelton  # as pip does for packages that are not editable: starts sooner
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -q -e ".[build,serve,dev]"
	touch $@

$(SMOLLM2): | $(VENV)/.installed
	$(PY) tools/fetch_models.py smollm2 $(MODELS)

$(GEMMA3): | $(VENV)/.installed
	$(PY) tools/fetch_models.py gemma3 $(MODELS)

quickstart: $(VENV)/.installed $(SMOLLM2)
	$(VENV)/bin/pelton build $(SMOLLM2) -o $(ENGINE) --force
	$(VENV)/bin/pelton run $(ENGINE) "Why is the sky blue?" --max-tokens 80 --temperature 0
	@echo
	@echo "It works. What to try next:"
	@echo "  $(VENV)/bin/pelton chat $(ENGINE)"
	@echo "  $(VENV)/bin/pelton serve $(ENGINE)      # then any OpenAI client at http://127.0.0.1:8000/v1"
	@echo "  $(VENV)/bin/pelton inspect $(ENGINE)"
	@echo "  $(VENV)/bin/pelton build YOUR_MODEL -o your.engine   # a Hugging Face folder or a GGUF file"

TEST_ENV := PELTON_SMOLLM2_GGUF=$(abspath $(SMOLLM2)) PELTON_GEMMA3_GGUF=$(abspath $(GEMMA3)) OMP_NUM_THREADS=1

# Two processes; a file's tests stay in one, with what they share. `pytest` by hand is one process.
PYTEST := $(TEST_ENV) $(PY) -m pytest -n 2 --dist loadfile

test: $(VENV)/.installed-dev $(SMOLLM2) $(GEMMA3) lint
	$(PYTEST)

test-all: $(VENV)/.installed-dev $(SMOLLM2) $(GEMMA3) lint
	$(PYTEST) -m "not gpu"

test-gpu:
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m pytest -m "gpu and not slow" -vv --tb=short --durations=10 -rfE tests/gpu

test-gpu-all:
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m pytest -m gpu -vv --tb=short --durations=10 -rfEs tests/gpu

test-gpu-sanitizers:
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) tools/gpu_sanitizers.py

test-sanitizers:
	for s in address thread; do \
	  cmake -S . -B build/$$s -DPELTON_SANITIZE=$$s >/dev/null && \
	  cmake --build build/$$s --target native_stress -j2 && \
	  build/$$s/src/pelton/kernels/csrc/native_stress || exit 1; \
	done

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check src tests benchmarks tools
	$(VENV)/bin/ruff format --check src tests benchmarks tools
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix src tests benchmarks tools
	$(VENV)/bin/ruff format src tests benchmarks tools

bench-cpu: $(VENV)/.installed-dev $(SMOLLM2) $(GEMMA3)
	$(PY) benchmarks/cpu.py $(SMOLLM2) $(GEMMA3)

native:
	cmake -S . -B build/native -DCMAKE_BUILD_TYPE=Release -DPELTON_INPLACE=ON >/dev/null
	cmake --build build/native -j2

clean:
	rm -rf build $(VENV) .cache
