# make demo    the main job: a prefill process and two decode ranks, on the CPU
# make test    everything that CI runs (docs/testing.md says what takes how long)
# make check   the quick loop, one to two minutes on 2 cores
# make test-vllm   with real vLLM servers, in an environment of their own (3.7 GB)

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= test
JOBS ?= 2
# Asked only where there is no NVIDIA GPU, so that no CUDA build is fetched for nothing.
# Another mirror: make setup TORCH_INDEX=https://...   None: make setup TORCH_INDEX=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Inputs for each surface of `make fuzz`
INPUTS ?= 1000000
# Arguments of `kvlift demo`, as in: make demo DEMO="--rounds 3 --json"
DEMO ?=

# Where vLLM's CPU build is or shall be; one beside this folder serves several checkouts.
VLLM_VENV ?= $(or $(KVLIFT_VLLM_VENV),$(firstword $(wildcard .vllm-venv ../.vllm-venv) .vllm-venv))

RUN := $(VENV)/bin
STAMP := $(VENV)/.kvlift-setup
STORIES = $(wildcard tests/stories/*.story ../shared/stories/*.story)
# Folders with Python files; mypy refuses one without.
TYPED = $(sort $(dir $(wildcard kvlift/*.py tests/*.py examples/*.py benches/*.py)))
# One thread per process: tests start several processes on few cores.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-vllm check lint types stories claims drawings quick real deep fuzz
.PHONY: mutation draw format upgrade clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt .ci/setup
	@PYTHON="$(PYTHON)" VENV="$(VENV)" EXTRAS="$(EXTRAS)" TORCH_INDEX="$(TORCH_INDEX)" .ci/setup
	@touch $@

demo: setup
	$(RUN)/kvlift demo $(DEMO)

# One part after the other, the cheap ones first; pytest's closing lines come last.
test: setup
	@$(MAKE) --no-print-directory lint types drawings stories claims quick real

# Starts up to five vLLM servers, one pair at a time: minutes on two cores, and 8 GB of memory.
test-vllm: setup
	@PYTHON="$(PYTHON)" VLLM_VENV="$(VLLM_VENV)" TORCH_INDEX="$(TORCH_INDEX)" .ci/setup-vllm
	KVLIFT_VLLM_VENV="$(abspath $(VLLM_VENV))" $(RUN)/pytest -q -m vllm tests/vllm

lint: setup
	$(RUN)/ruff check .

types: setup
	$(RUN)/mypy $(TYPED)

drawings: setup
	$(RUN)/kvlift draw --check

stories: setup
	$(RUN)/kvlift story $(STORIES)

claims: setup
	$(RUN)/kvlift check

# Tests that keep to their own process share the cores; the others need them for themselves.
quick: setup
	$(RUN)/pytest -q -m "not real" -n $(JOBS)

real: setup
	$(RUN)/pytest -q -m real

# What takes minutes; -s for the figures.
deep: setup
	$(RUN)/pytest -q -s -m deep

# Wrong inputs by the million, each surface in a process of its own.
fuzz: setup
	$(RUN)/python -m tests.fuzz all --inputs $(INPUTS) --out benches/results/fuzz.json

check: setup
	@$(MAKE) --no-print-directory lint types
	$(RUN)/pytest -q -m "not real and not slow" -n $(JOBS) -x

# Every small change of kvlift/core: mypy or a test must notice it (docs/mutation.md). About an hour
# of one core from nothing; what is in out/mutation is not done again.
mutation: setup
	@$(RUN)/python -c "import mutmut" 2>/dev/null || \
		$(RUN)/pip install -q -c constraints.txt -e ".[$(EXTRAS),mutation]"
	$(RUN)/python -m tests.mutation --jobs $(JOBS) --again alive \
		--result benches/results/mutation-core.json

draw: setup
	$(RUN)/kvlift draw --write

format: setup
	$(RUN)/ruff format .
	$(RUN)/ruff check --fix .

# Newest versions that pyproject.toml allows, written down for everyone. torch's local suffix
# (+cpu, +cu126) is left out: which build it is depends on the machine.
upgrade: setup
	$(RUN)/pip install --upgrade --upgrade-strategy eager -e ".[$(EXTRAS)]"
	@sed -n '/^#/p' constraints.txt > constraints.new
	@$(RUN)/pip freeze --exclude-editable | sed 's/^\(torch==[^+]*\)+.*/\1/' >> constraints.new
	@mv constraints.new constraints.txt
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
