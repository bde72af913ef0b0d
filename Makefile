# Two commands: `make run` executes every notebook and writes the report, `make test` runs what CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc 2>/dev/null || echo 1)
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with tests/notebooks/sanitize.cfg \
	--nbval-cell-timeout 300 --nbval-kernel-startup-timeout 120 -n $(JOBS) --dist loadfile

.PHONY: run test lab bench notebooks lint unit nbval real lock clean

run: $(VENV)/.installed
	$(BIN)/rackbook run

test: lint unit nbval real

lab: $(VENV)/.installed
	$(BIN)/rackbook lab

bench: $(VENV)/.installed-test
	$(BIN)/python tests/bench/run.py

# Re-executes the committed notebooks in place, for whoever changed one or the library under it.
notebooks: $(VENV)/.installed
	$(BIN)/rackbook refresh
	$(BIN)/python tests/packaging/readme_picture.py

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

unit: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --ignore tests/engine --ignore tests/slurm tests

# Twice: a notebook that agrees with its committed outputs only once depends on something it should not.
nbval: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(NBVAL) notebooks
	$(BIN)/python -m pytest $(NBVAL) notebooks

# A real vLLM on the processor and a real Slurm. Most of a server's start keeps one core busy, so two files at a time.
# What the machine lacks for them is skipped, and said.
real: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/engine
	$(BIN)/python -m pytest tests/slurm

lock: $(VENV)/.installed-test
	$(BIN)/uv pip compile --universal --python-version 3.11 --extra test --no-header --no-annotate \
		--no-emit-index-url --no-emit-find-links --output-file requirements.lock pyproject.toml

.venv: $(VENV)/.installed

# The stamps are written last: an interrupted installation has none and is done again.
$(VENV)/.installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rackbook needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=…" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[test]'
	@touch $@

clean:
	rm -rf build dist
