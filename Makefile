# Each target sets up its own virtual environment from nothing: Python 3.11 or later and git are all it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-extras test-release docs lint bench bench-workers reliability study-figures clean

demo: $(READY)  ## DBench's quickstart on embedded data; ends with the path of a report to open in a browser
	$(BIN)/gossamer bench quickstart --out runs/quickstart

test: $(READY)  ## everything that is checked automatically
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore tests/extras

EXTRAS := tensorboard,wandb,mlflow,trackio,export,notebook,lightning,accelerate,transformers,ray,slurm
test-extras: $(READY)  ## with the real libraries of other people: loggers, notebooks, trainers, engines
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]' 'ray[train]'
	timeout 900 $(BIN)/python -m pytest tests/extras

test-release: $(READY)  ## wheel and sdist: built, checked, and used in a fresh environment
	timeout 600 .ci/release

docs: $(READY)  ## the docs as a site, with warnings as errors: site/index.html; and the commands and code of its tutorials run
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	timeout 600 $(BIN)/python -m pytest tests/site

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## the benchmarks, with the bars that they must meet
	$(BIN)/python -m benchmarks.mixing
	$(BIN)/python -m benchmarks.replicas
	$(BIN)/python -m benchmarks.accum_adam
	$(BIN)/python -m benchmarks.dbench

bench-workers: $(READY)  ## real workers against torch DDP and decent-dp, also in the lab: root, half an hour, nothing else running
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.time_to_loss
	$(BIN)/python -m benchmarks.wire

reliability: $(READY)  ## a million simulated schedules, and campaigns on real workers: kills, pauses; an hour, nothing else running
	$(BIN)/python -m benchmarks.schedules
	$(BIN)/python -m benchmarks.reliability scripts
	$(BIN)/python -m benchmarks.reliability kills
	$(BIN)/python -m benchmarks.reliability pauses

study-figures: $(READY)  ## figures and tables of docs/study.md from the committed results
	$(BIN)/python -m studies figures

# torch first and by exact version: a range would fetch the newest build, with gigabytes of GPU libraries.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
