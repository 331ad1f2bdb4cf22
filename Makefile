# Every target builds its own environment in .venv first; nothing has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two files at a time: most of their time a test's processes start, or wait for one another.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
# The limit is that of a cell: a whole notebook may take longer than a test.
NOTEBOOKS := IPP_NONINTERACTIVE=1 $(PYTEST) --timeout=900 --nbmake --nbmake-timeout=180 notebooks

.PHONY: help environment tutorials test test-full test-grid lab notebooks check instance clean

help:                          ## what there is to make
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

# In words that Python 2 reads too.
SUPPORTED := import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 14) else \
	'Python 3.11 to 3.14 is needed, $(PYTHON) is %d.%d: make PYTHON=python3.11, for example' % v)
XLA := import importlib.util as u; u.find_spec('torch_xla') or print('Without the backend xla: \
	torch-xla has packages for Linux on x86_64 with Python 3.11 to 3.13 only')

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c "$(SUPPORTED)"
	@echo "Building $(VENV): 4.5 GB to download, most of it CUDA libraries, and 9 GB on disk"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[xla,test]'
	$(BIN)/python -m data_scripts.dump
	@$(BIN)/python -c "$(XLA)"
	touch $(READY)

environment: $(READY)          ## .venv, which every other target makes too

tutorials: $(READY)            ## every notebook, executed into build/executed/ as .ipynb and .html
	$(BIN)/python -m notebooks.run tutorials

test: $(READY)                 ## what a user runs: unit and multi-rank tests, every notebook once
	$(PYTEST) -m "not slow and not grid" tests
	$(NOTEBOOKS)

test-full: $(READY)            ## the whole: what `make test` does, then the slower rest
	$(PYTEST) -m "not grid" tests
	$(NOTEBOOKS)

test-grid: $(READY)            ## every combination of the models, more notebooks, a hundred kills
	$(PYTEST) -m grid tests

check: $(READY)                ## the layout of the code, and the rules that pyproject.toml names
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

lab: $(READY)                  ## JupyterLab on the notebooks; LAB="--no-browser …" are options for it
	$(BIN)/jupyter lab $(LAB) notebooks

notebooks: $(READY)            ## refresh the committed outputs
	$(BIN)/python -m notebooks.run refresh

# pip would replace an older numpy for the sake of a newer package that asks for it.
KEPT := torch|numpy|protobuf|neuron|libneuron|nki|jax|ml.dtypes|nvidia|triton

instance:                      ## into the active environment, which keeps its torch, numpy and Neuron packages
	@$(PYTHON) -c "$(SUPPORTED)"
	mkdir -p build
	$(PYTHON) -m pip list --format freeze | grep -iE '^($(KEPT))' > build/kept.txt || true
	# It needs numpy 2 and does not say so: the compiler of an instance keeps numpy at 1.26.
	if grep -q '^numpy==1' build/kept.txt; then echo 'pyarrow<26' >> build/kept.txt; fi
	$(PYTHON) -m pip install --constraint build/kept.txt --editable .
	$(PYTHON) -m data_scripts.dump

clean:                         ## remove build/ and .venv
	rm -rf build $(VENV)
