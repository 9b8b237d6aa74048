# Needs make and Python 3.10-3.13. Everything else goes into .venv. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
TORCH_TPU ?= .venv-torch-tpu
PLATFORMS ?= .venv-platforms
CANDIDATES := $(PYTHON) python3 python3.13 python3.12 python3.11 python3.10
META := pyproject.toml setup.py tools/install.sh
BIN := $(VENV)/bin
.PHONY: help demo test test-fast test-slow test-all test-oldest test-tpu-backend test-platforms bench compile-all nbs tutorials docs dist clean

help:
	@echo 'make demo          install into $(VENV) and train on handwritten digits (the main job)'
	@echo 'make test          install into $(VENV) and run the tests and notebooks, but those that are marked slow'
	@echo 'make test-fast     a first look in two minutes'
	@echo 'make test-slow     what is long and rare: kills at every place, compilers of chips, several hosts, demos'
	@echo 'make test-all      test and test-slow, as CI does'
	@echo 'make test-oldest   the same tests with the oldest supported versions, in $(OLDEST)'
	@echo 'make test-tpu-backend  the tests of the second backend: TorchTPU itself, on this CPU, in $(TORCH_TPU) (Python 3.11 to 3.13)'
	@echo 'make test-platforms  what each extra resolves to, then the environments of Kaggle and Colab, in $(PLATFORMS), and what a user runs first in them'
	@echo 'make bench         what the host does in a step, beside a hand-written torch_xla loop and others: table and bench.json'
	@echo 'make compile-all   every family of programs through the compiler of a TPU, at full effort (no TPU needed): a table'
	@echo 'make nbs           export modules from the notebooks, clean the notebooks, render README.md'
	@echo 'make tutorials     run the guide, the tutorials and the notebooks for platforms and store their outputs'
	@echo 'make docs          the documentation as a static site, in _docs'
	@echo 'make dist          wheel and source distribution, in dist'
	@echo 'make clean         remove what the other targets made, environments too'
	@echo 'Options: PYTHON=/path/to/python3.12; for the tests FILES="tests/test_repo.py ...", CHAPTER=checkpoint and JOBS=2; for the bench BENCH="--works vit"; for compile-all FAMILIES="unet gan"'

demo: $(VENV)/.done
	@$(BIN)/fastai-xla demo

RUN_TESTS = $(BIN)/python tools/run_tests.py --jobs=$(or $(JOBS),2) $(if $(CHAPTER),--chapter=$(CHAPTER)) $(FILES)
test: $(VENV)/.done-dev
	@$(RUN_TESTS) --level=test

test-fast: $(VENV)/.done-dev
	@$(RUN_TESTS) --level=fast

test-slow: $(VENV)/.done-dev
	@$(RUN_TESTS) --level=slow

test-all: $(VENV)/.done-dev
	@$(RUN_TESTS) --level=all

test-oldest: $(OLDEST)/.done-dev
	@$(OLDEST)/bin/python tools/run_tests.py --jobs=$(or $(JOBS),2) $(FILES)

test-tpu-backend: $(TORCH_TPU)/.done
	@$(TORCH_TPU)/bin/python tests/torch_tpu/run.py --jobs=$(or $(JOBS),2) $(FILES)

test-platforms: $(VENV)/.done-dev
	@$(BIN)/python -m pip install -q 'uv>=0.5' && $(BIN)/python tools/platforms.py table
	@for o in kaggle colab; do $(BIN)/python tools/platforms.py make $$o $(PLATFORMS)/$$o && $(BIN)/python tools/platforms.py check $(PLATFORMS)/$$o || exit 1; done

bench: $(VENV)/.done-bench
	@$(BIN)/python benchmarks/bench.py $(BENCH)

compile-all: $(VENV)/.done-dev
	@$(BIN)/python benchmarks/compile_all.py $(FAMILIES)

nbs: $(VENV)/.done-dev
	@$(BIN)/nbdev-export && $(BIN)/nbdev-clean && $(BIN)/python tools/readme.py

tutorials: $(VENV)/.done-dev
	@$(BIN)/python tools/tutorials.py && $(BIN)/nbdev-clean

docs: $(VENV)/.done-docs
	@$(BIN)/python tools/docs.py

dist: $(VENV)/.done-dev
	@rm -rf build dist && $(BIN)/python -m build -q && ls dist

clean:
	rm -rf $(VENV) $(OLDEST) $(TORCH_TPU) $(PLATFORMS) build dist *.egg-info _docs _proc .pytest_cache out models

$(VENV)/.done: $(META)
	@python=$$(tools/find_python.sh $(CANDIDATES)) && tools/install.sh $(VENV) "$$python" -e '.[xla]' && touch $@

$(VENV)/.done-dev: $(META)
	@python=$$(tools/find_python.sh $(CANDIDATES)) && tools/install.sh $(VENV) "$$python" -e '.[dev]' && touch $(VENV)/.done $@

$(VENV)/.done-bench: $(META)
	@python=$$(tools/find_python.sh $(CANDIDATES)) && tools/install.sh $(VENV) "$$python" -e '.[bench]' && touch $(VENV)/.done $@

$(VENV)/.done-docs: $(META)
	@python=$$(tools/find_python.sh $(CANDIDATES)) && tools/install.sh $(VENV) "$$python" -e '.[dev,docs]' && touch $(VENV)/.done $(VENV)/.done-dev $@

$(TORCH_TPU)/.done: pyproject.toml setup.py tools/install_torch_tpu.sh tests/torch_tpu/on_cpu/pyproject.toml tests/torch_tpu/on_cpu/torch_tpu_on_cpu.py
	@python=$$(tools/find_python.sh $(PYTHON_TPU) python3.11 python3.12 python3.13 $(PYTHON)) && \
	  tools/install_torch_tpu.sh $(TORCH_TPU) "$$python" && touch $@

$(OLDEST)/.done-dev: $(META) constraints-oldest.txt
	@python=$$(tools/find_python.sh python3.10 python3.11 python3.12 $(CANDIDATES)) && \
	  tools/install.sh $(OLDEST) "$$python" -e '.[dev]' -c constraints-oldest.txt && touch $@
