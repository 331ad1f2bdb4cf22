# Every target builds its own environment in .venv first; nothing has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help tutorials test test-full test-grid lab notebooks clean

help:                          ## what there is to make
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[xla,test]'
	touch $(READY)

tutorials: $(READY)            ## every notebook, executed into build/executed/ as .ipynb and .html
	$(BIN)/python -m notebooks.run tutorials

test: $(READY)                 ## what a user runs: unit and multi-rank tests, every notebook once
	$(BIN)/python -m pytest -m "not slow and not grid" tests
	IPP_NONINTERACTIVE=1 $(BIN)/python -m pytest --nbmake --nbmake-timeout=180 notebooks

test-full: $(READY)            ## the whole: what `make test` does, then the slower rest
	$(BIN)/python -m pytest -m "not grid" tests
	IPP_NONINTERACTIVE=1 $(BIN)/python -m pytest --nbmake --nbmake-timeout=180 notebooks

test-grid: $(READY)            ## every combination of the models, more notebooks, a hundred kills
	$(BIN)/python -m pytest -m grid tests

lab: $(READY)                  ## JupyterLab on the notebooks
	$(BIN)/jupyter lab notebooks

notebooks: $(READY)            ## refresh the committed outputs
	$(BIN)/python -m notebooks.run refresh

clean:                         ## remove build/ and .venv
	rm -rf build $(VENV)
