# make run: create a virtual environment, install, run the main job. make test: the same, then the tests.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
PINNED := -c .ci/constraints.txt
export OMP_NUM_THREADS ?= 2
export HF_HUB_OFFLINE ?= 1

.PHONY: run test test-all bench families memory learn lint clean

run: $(VENV)/installed
	$(PY) -m flowrun

# Two workers, each with one thread.
test test-all: export OMP_NUM_THREADS = 1

test: $(VENV)/installed
	$(PY) -m pytest -n 2 --dist loadfile -m "not slow"

test-all: $(VENV)/installed
	$(PY) -m pytest -n 2 --dist loadfile

bench: $(VENV)/installed
	$(PY) tests/bench/run.py

# The table of model families in README.md.
families: $(VENV)/installed
	$(PY) -m flowrun.families

# The memory table of recipes in README.md.
memory: $(VENV)/installed
	$(PY) -m flowrun.memory

# GRPO and DiffusionNFT on the main job's model, three seeds each, and by how much they raised the rewards.
LEARN := $(or $(FLOWRUN_OUTPUTS),outputs)
LEARNED := learn-$(shell date +%y%m%d-%H%M%S)
learn: $(VENV)/installed
	test -f $(LEARN)/learn/base/result.json || FLOWRUN_RUN_DIR=$(abspath $(LEARN)/learn/base) $(PY) -m flowrun
	$(PY) -m flowrun -m experiment=emoji_nft,emoji_grpo seed=0,1,2 model.weights=$(abspath $(LEARN)/learn/base) run_id=$(LEARNED)
	$(PY) -m flowrun.raised $(LEARN)/sweeps/$(LEARNED)/*/ --curves $(LEARN)/sweeps/$(LEARNED)/curves.csv

lint: $(VENV)/installed
	$(PY) -m ruff check flowrun tests notebooks

clean:
	rm -rf $(VENV) build *.egg-info

# torch first, so that a build of it that is already at hand is taken rather than a larger one. Modules are compiled when they are first used.
$(VENV)/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-compile $(PINNED) torch
	$(PY) -m pip install --quiet --no-compile $(PINNED) -e '.[demo,test,notebooks]'
	touch $@
