# make demo   a virtual environment in .venv, the package, the demo model, a first continuation
# make test   the same environment, then the linter and the whole test suite
# make test-cuda   the tests of kernels and models on the GPU of this machine
# make clean  remove the environment and what was built
#
# Torch is installed first and the package without build isolation: an isolated build would fetch a second torch, which
# for many platforms is a CUDA build of several gigabytes. TORCH names the version (any from 2.10 on); after a change of
# it, or of PYTHON, say `make clean` first.
PYTHON ?= python3
TORCH ?= torch==2.13.0

MODEL := smollm2-135m-instruct
PROMPT := The capital of France is

# Tests start many processes, each of which would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
NATIVE := setup.py pyproject.toml ops/ggml_types.py ops/codebooks.py \
	$(shell find ops/csrc -name generated -prune -o -type f -print)

.PHONY: demo install test test-cuda lint clean
.DELETE_ON_ERROR:

demo: install
	$(BIN)/dasllama-torch run $(MODEL) "$(PROMPT)" --max-tokens 48

install: $(VENV)/installed

test: $(VENV)/test-extras lint
	$(BIN)/python -m pytest -n auto --dist worksteal

# PYTEST: of an environment whose torch has CUDA.
PYTEST ?= $(BIN)/python -m pytest
test-cuda:
	$(PYTEST) tests/test_triton_*.py tests/test_cuda_*.py

lint: $(VENV)/test-extras
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build *.egg-info ops/csrc/generated
	rm -f ops/*.so

# A stamp is touched only after its step has succeeded, so a step that was interrupted runs again.
$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed, and %s is %s; name another one with make PYTHON=..." % (sys.executable, sys.version.split()[0]))'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/torch: $(VENV)/created
	$(PIP) "$(TORCH)" "setuptools>=77" wheel ninja numpy
	touch $@

$(VENV)/installed: $(VENV)/torch $(NATIVE)
	$(PIP) --no-build-isolation -e .
	touch $@

# The package is there already, so this adds what its extra names and builds nothing.
$(VENV)/test-extras: $(VENV)/installed
	$(PIP) "dasllama-torch[test]"
	touch $@
