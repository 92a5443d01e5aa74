# The same few commands for people and for CI; each makes .venv first if it has to.
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: setup demo demo-model test test-slow check format bench docs

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

check: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(READY)
	$(foreach file,$(wildcard bench/*.py),$(PY) $(file) &&) true

bench-models: $(READY)
	cd bench && ../$(PY) -m models.train

docs: $(READY)
	$(PY) docs/generate.py
	$(PY) docs/measured.py
