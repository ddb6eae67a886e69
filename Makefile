# Two commands: `make demo` trains a model whose state is many times the memory it is given; `make test` runs the tests.
# Each makes .venv first when it is missing. Needs Python >= 3.11 with venv, a C++ compiler, and the network, once.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# What an editable install has to be made again for: the native library, and packages that were not there before.
BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt \
	$(shell find src/penstock/optim/native src/penstock/store/native src/penstock/sim/native -type f) $(shell find src/penstock -name __init__.py)

# Each of the many processes of the tests that import torch compiles it anew where Python may not keep what it compiles:
# two thirds of its time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test faults products proofs sweep wheel docs lint bench

demo: $(READY)
	$(BIN)/penstock train examples/demo.yaml --overwrite
	@echo
	@echo 'To go on:  . $(BIN)/activate                    (puts penstock on the PATH of this shell)'
	@echo '           penstock report runs/demo --svg      (one HTML page of the run, and a picture of a step)'

# One process for each core: tests hardly wait, and each process more imports, collects and makes what tests share once more.
# Each takes tests from another's list when its own is done.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 20

# Every fault of docs/reliability.md, as often as it says there; as root, also on a small file system of its own.
faults: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --campaign tests/campaigns

# Schedules and plans of many thousands of programs of every kind, other ones in each run; delays that plans choose; models
# of every kind, thousands of them, beside a plain loop of torch; calls of an engine in any order; settings of every kind
# beside the plainest, of several ranks, too; any documents beside a plain reference; runs of the libraries' loops by any
# arguments. Hours.
proofs: $(READY)
	$(BIN)/python -m pytest --campaign tests/schedule/test_any_program.py tests/planner/test_delay_choice.py
	$(BIN)/python -m pytest --campaign tests/engine/test_any_model.py tests/engine/test_any_memory.py tests/tape/test_any_model.py tests/engine/test_any_model_on_accelerator.py tests/ranks/test_any_model.py
	$(BIN)/python -m pytest --campaign tests/engine/test_any_calls.py tests/cli/test_any_settings.py tests/ranks/test_any_settings.py tests/data/test_any_data.py tests/hf/test_any_arguments.py

# Every case of the products of settings of which `make test` runs a sample, what it leaves out, and all that ranks have;
# those of faults `make faults` runs, those of random models and settings `make proofs`.
products: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --campaign -m 'sampled or campaign' --ignore tests/campaigns --ignore tests/ranks --ignore tests/project/test_wheel.py
	$(BIN)/python -m pytest --campaign tests/ranks --ignore tests/ranks/test_any_model.py --ignore tests/ranks/test_any_settings.py

# Every type of model of the installed transformers, tiny, against a plain loop of torch; about half an hour of a core.
# It goes on where it was stopped: remove tests/sweep/results.json to begin anew.
sweep: $(READY)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --upgrade --target .venv/sweep timm torchvision scipy
	$(BIN)/python -m tests.sweep

# The wheel of this machine, made of the sdist, in dist/; then a wheel is installed where there is no compiler, and trains,
# and what another kind of processor computes is compared. Some minutes.
wheel: $(READY)
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m pytest --campaign -m campaign

# The documentation as a site: build/site/index.html. Pages lie as in the repository, so links are the same in both.
PAGES := build/pages
docs: .venv/.docs
	rm -rf $(PAGES) && mkdir -p $(PAGES)/docs
	cp README.md $(PAGES)/index.md && cp CHANGELOG.md CONTRIBUTING.md SECURITY.md $(PAGES)
	cp docs/*.md docs/*.svg $(PAGES)/docs && cp -r examples $(PAGES)
	sed -i 's|\.\./README\.md|../index.md|; s|\[\(bench/results\)\](bench/results)|`\1`|' $(PAGES)/*.md $(PAGES)/docs/*.md
	$(BIN)/zensical build --strict --clean

lint: $(READY)
	$(BIN)/ruff check src tests bench examples docs
	$(BIN)/ruff format --check src tests bench examples docs
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m bench.adamw
	$(BIN)/python -m bench.disk
	$(BIN)/python -m bench.overhead
	$(BIN)/python -m bench.host_share
	$(BIN)/python -m bench.large
	$(BIN)/python -m bench.folder
	$(BIN)/python -m bench.prediction
	$(BIN)/python -m bench.lp_vs_brute_force
	$(BIN)/python -m bench.clipping
	$(BIN)/python -m bench.graphs
	$(BIN)/python -m bench.alpha
	$(BIN)/python -m bench.commit
	$(BIN)/python -m bench.roofline

# torch goes first and pinned, so that nothing else picks another build of it. The native library is built here, too.
# Python compiles a module when it is first imported; pip would spend a minute on all that nobody imports.
.venv/.docs: $(READY) pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[docs]'
	touch $@

$(READY): $(BUILT_FROM)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Penstock needs Python 3.11 or newer, this is " + sys.version'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[hf,report,dev]'
	touch $(READY)
