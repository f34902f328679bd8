# Every target sets up what it needs in .venv by itself, once.
#   make demo    the whole story in three minutes, no GPU needed
#   make test    the tests; with DEVICE=cuda those of no device in particular, on that device
#   make selftest DEVICE=sim ARGS=--quick   proof on a device; without DEVICE on this machine's accelerator (RANKS=2 for
#                DDP and FSDP2), in lowtide-selftest.json and .html
#   make test-all   the slow ones, too
#   make fuzz MINUTES=10   random training programs under every policy, new ones for so long
#   make lint    ruff, mypy --strict, import-linter
#   make bench   side by side with peers, which go into .venv-peers (half an hour, mostly the disk; ARGS="loss --store")
#   make test-peers   the tests that need a peer's package
#   make test-compat   the tests with the oldest supported transformers, which goes into .venv-compat
#   make test-torch TORCH=2.15.0   the tests with another torch, which goes into .venv-torch-2.15.0 (some gigabytes);
#                writes docs/versions.json and README's table
#   make test-foreign   other packages' tests with Lowtide in the place of theirs, from .foreign and .venv-foreign;
#                writes docs/foreign.json (ten minutes)
#   make test-vision   diffusion and vision models (diffusers, timm) under every policy, from .venv-vision; writes
#                docs/vision.json (a few minutes; ARGS=--plans writes docs/video_plans.json instead)
#   make mutants SEED=1 COUNT=10   breaks the engine on purpose, ten times; writes docs/mutants.json (ARGS="--room stores")
#   make zoo     audits every class and variant of transformers, theirs and ours, and writes docs/zoo (hours; goes on where it
#                was stopped)
#   make plans   the tables of plans in the docs, and the drawings of a step (about half an hour)
#   make plans-measured   plans beside memory that others measured on GPUs (ten minutes; ARGS="4 11 --store")
#   make hardware    the page of devices, from docs/hardware
#   make docs    the documentation site, in site/
#   make dist    wheel and source distribution, in dist/
#   make dist-check   installs the wheel in a clean environment and uses it there
#   make changelog    what the next version brings, from changes/
#   make hooks   git hooks that run what make lint runs

PYTHON ?= python3
BIN := .venv/bin
PEERS := .venv-peers/bin
COMPAT := .venv-compat/bin
FOREIGN := .venv-foreign/bin
VISION := .venv-vision/bin
SEED ?= 1
COUNT ?= 10
PARALLEL ?= -n 2 --dist loadfile
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: zoo plans plans-measured hardware demo test selftest test-all fuzz test-peers test-compat test-torch test-foreign test-vision mutants lint bench docs dist dist-check changelog hooks clean

demo: .venv/.demo
	$(BIN)/lowtide demo

test: .venv/.dev
	$(if $(DEVICE),LOWTIDE_TEST_DEVICE=$(DEVICE)) $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

RANKS ?= 1

selftest: .venv/.dev
	$(BIN)/lowtide selftest $(if $(DEVICE),--device $(DEVICE)) --ranks $(RANKS) --html lowtide-selftest.html $(ARGS)

test-all: .venv/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m "" $(ARGS)

MINUTES ?= 10

fuzz: .venv/.dev
	LOWTIDE_FUZZ_MINUTES=$(MINUTES) $(BIN)/python -m pytest tests/faults/test_random_training.py -k new_programs --timeout=0 $(ARGS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/repository/typed
	$(BIN)/lint-imports

bench: .venv/.dev .venv-peers/.ready
	$(PEERS)/python -W ignore -m bench.run $(ARGS)

test-peers: .venv-peers/.ready
	LOWTIDE_PEERS=1 TRITON_INTERPRET=1 $(PEERS)/python -m pytest tests/peers tests/losses/test_liger.py $(ARGS)

test-compat: .venv-compat/.ready
	$(COMPAT)/python -m pytest $(PARALLEL) $(ARGS)

test-torch: $(if $(TORCH),.venv-torch-$(TORCH)/.ready)
	$(if $(TORCH),,$(error say which torch: make test-torch TORCH=2.15.0))
	.venv-torch-$(TORCH)/bin/python tools/torch_versions.py $(PARALLEL) $(ARGS)

test-foreign: .venv-foreign/.ready
	$(FOREIGN)/python tools/foreign_tests.py

test-vision: .venv-vision/.ready
	$(VISION)/python tools/vision_tests.py $(ARGS)

mutants: .venv/.dev
	$(BIN)/python tools/mutants.py --seed $(SEED) --count $(COUNT) $(ARGS)

ZOO := $(BIN)/lowtide audit --zoo --every-class --variants --resume --format json
TRANSFORMERS = $(shell $(BIN)/python -c "import importlib.metadata as m; print(m.version('transformers'))")

# An exit code of 1 says that something failed, which is what the page is for.
zoo: .venv/.dev
	@mkdir -p docs/zoo
	$(ZOO) --engine transformers --records zoo-theirs.jsonl -o docs/zoo/transformers-$(TRANSFORMERS).json || test $$? = 1
	$(ZOO) --engine lowtide --records zoo-ours.jsonl -o docs/zoo/lowtide-on-transformers-$(TRANSFORMERS).json || test $$? = 1
	$(BIN)/python bench/zoo_page.py

plans: .venv/.dev
	$(BIN)/python -m bench.longest_sequences
	$(BIN)/python -m bench.plan_tables
	$(BIN)/python bench/step_drawings.py
	$(BIN)/python -m bench.planner_page

plans-measured: .venv/.dev
	$(BIN)/python -m bench.measured.compare $(ARGS)

hardware: .venv/.dev
	$(BIN)/python bench/hardware_page.py

# An address of the project, from the one place where they stand; nothing while it is not filled in.
url = $(shell $(BIN)/python -c "import tomllib; print(tomllib.load(open('pyproject.toml', 'rb'))['project']['urls'].get('$(1)', 'null'))")

docs: .venv/.docs
	LOWTIDE_DOCUMENTATION=$(call url,Documentation) LOWTIDE_REPOSITORY=$(call url,Repository) \
		NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: .venv/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

dist-check: dist
	$(BIN)/python tools/dist_check.py dist

changelog: .venv/.dev
	$(BIN)/towncrier build --draft

hooks: .venv/.dev
	$(PIP) pre-commit
	$(BIN)/pre-commit install

clean:
	rm -rf .venv .venv-peers .venv-compat .venv-foreign .venv-vision .foreign .venv-torch-* site dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# torch comes first: other packages then find it there and pull no other build of it.
.venv/.torch: constraints.txt
	@echo "Setting up .venv with torch (once)"
	$(PYTHON) -m venv .venv
	$(PIP) torch
	@touch $@

.venv/.demo: .venv/.torch pyproject.toml
	@echo "Installing lowtide with what the demo needs (once)"
	$(PIP) -e '.[hf,sim]'
	@touch $@

.venv/.dev: .venv/.torch pyproject.toml
	@echo "Installing lowtide with what the tests need (once)"
	$(PIP) -e '.[dev]'
	@touch $@

# Peers, compat, foreign and vision sit on top of .venv, without dependencies of their own: none may replace what the tests run
# with.
.venv-peers/.ready .venv-compat/.ready .venv-foreign/.ready .venv-vision/.ready: .venv-%/.ready: .venv/.dev constraints-%.txt
	@echo "Setting up .venv-$* (once)"
	$(BIN)/python -m venv .venv-$*
	.venv-$*/bin/python bench/share_packages.py .venv
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-$*.txt
	@touch $@

# Another torch on top of .venv. The pins do not hold for it: they name one torch.
.venv-torch-%/.ready: .venv/.dev
	@echo "Setting up .venv-torch-$* (once, some gigabytes)"
	$(BIN)/python -m venv .venv-torch-$*
	.venv-torch-$*/bin/python bench/share_packages.py .venv
	.venv-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check torch==$*
	@touch $@

.venv/.docs: .venv/.dev
	@echo "Installing what the documentation needs (once)"
	$(PIP) -e '.[docs]'
	@touch $@
