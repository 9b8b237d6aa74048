# Needs make and Python 3.10-3.13. Everything else goes into .venv. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
CANDIDATES := $(PYTHON) python3 python3.13 python3.12 python3.11 python3.10
META := settings.ini setup.py pyproject.toml tools/install.sh
BIN := $(VENV)/bin
.PHONY: help demo test test-oldest test-processes bench compile-all nbs tutorials docs dist clean

help:
	@echo 'make demo          install into $(VENV) and train on handwritten digits (the main job)'
	@echo 'make test          install into $(VENV) and run every test and notebook'
	@echo 'make test-oldest   the same tests with the oldest supported versions, in $(OLDEST)'
	@echo 'make test-processes  the suites of replicas with a process for each virtual core, as on a v5e-8'
	@echo 'make bench         what the host does in a step, beside a hand-written torch_xla loop and others: table and bench.json'
	@echo 'make compile-all   every family of programs through the compiler of a TPU, at full effort (no TPU needed): a table'
	@echo 'make nbs           export modules from the notebooks, clean the notebooks, render README.md'
	@echo 'make tutorials     run the guide, the tutorials and the notebooks for platforms and store their outputs'
	@echo 'make docs          the documentation as a static site, in _docs'
	@echo 'make dist          wheel and source distribution, in dist'
	@echo 'make clean         remove what the other targets made, environments too'
	@echo 'Options: PYTHON=/path/to/python3.12; for the tests FILES="tests/test_repo.py ..." and JOBS=2; for the bench BENCH="--works vit"; for compile-all FAMILIES="unet gan"'

demo: $(VENV)/.done
	@$(BIN)/fastai-xla demo

test: $(VENV)/.done-dev
	@$(BIN)/python tools/run_tests.py --jobs=$(or $(JOBS),2) $(FILES)

test-oldest: $(OLDEST)/.done-dev
	@$(OLDEST)/bin/python tools/run_tests.py --jobs=$(or $(JOBS),2) $(FILES)

PROCESS_FILES := $(addprefix tests/test_,$(addsuffix .py,launch pool distributed exact pickling checkpoint fsdp fsdp_pool hosts))
test-processes: $(VENV)/.done-dev
	@FASTAI_XLA_PROCESSES=1 $(BIN)/python tools/run_tests.py --jobs=1 $(or $(FILES),$(PROCESS_FILES))

bench: $(VENV)/.done-bench
	@$(BIN)/python benchmarks/bench.py $(BENCH)

compile-all: $(VENV)/.done-dev
	@$(BIN)/python benchmarks/compile_all.py $(FAMILIES)

nbs: $(VENV)/.done-dev
	@$(BIN)/nbdev-export && $(BIN)/python tools/messages.py && $(BIN)/nbdev-clean && $(BIN)/python tools/readme.py

tutorials: $(VENV)/.done-dev
	@$(BIN)/python tools/tutorials.py && $(BIN)/nbdev-clean

docs: $(VENV)/.done-docs
	@$(BIN)/python tools/docs.py

dist: $(VENV)/.done-dev
	@rm -rf build dist && $(BIN)/python -m build -q && ls dist

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info _docs _proc .pytest_cache out models

$(VENV)/.done: $(META)
	@python=$$(tools/find_python.sh $(CANDIDATES)) && tools/install.sh $(VENV) "$$python" -e . && touch $@

$(VENV)/.done-dev: $(META)
	@python=$$(tools/find_python.sh $(CANDIDATES)) && tools/install.sh $(VENV) "$$python" -e '.[dev]' && touch $(VENV)/.done $@

$(VENV)/.done-bench: $(META)
	@python=$$(tools/find_python.sh $(CANDIDATES)) && tools/install.sh $(VENV) "$$python" -e '.[bench]' && touch $(VENV)/.done $@

$(VENV)/.done-docs: $(META)
	@python=$$(tools/find_python.sh $(CANDIDATES)) && tools/install.sh $(VENV) "$$python" -e '.[dev,docs]' && touch $(VENV)/.done $(VENV)/.done-dev $@

$(OLDEST)/.done-dev: $(META) constraints-oldest.txt
	@python=$$(tools/find_python.sh python3.10 python3.11 python3.12 $(CANDIDATES)) && \
	  tools/install.sh $(OLDEST) "$$python" -e '.[dev]' -c constraints-oldest.txt && touch $@
