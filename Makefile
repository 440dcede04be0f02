# Everything runs in a virtual environment of its own, .venv, made on first use and again when pyproject.toml changes.
#
#   make demo       train on handwritten digits at O0..O3; tables on screen, plot in runs/demo/
#                   make demo ARGS=--publish  puts both into the documentation
#   make test       the test suite but for what takes long, on torch and a few small packages    make test ARGS="-k trees"
#   make test-long  the rest of it: frameworks, which it installs, several processes, compilers, benchmarks
#   make test-newest  a part of it on the newest torch that is known to work, in .venv-newest (5 GB)
#   make test-oldest  a smaller part of it on the oldest torch that is supported, in .venv-oldest: 4 minutes on two cores
#   make nightly    the long randomised runs that the test suite leaves out
#   make docs       the site, into runs/site/; installs Sphinx, and no framework
#   make package    build, check and try the wheel and the source archive, in runs/package/
#   make lines      count lines of Python, by folder
#   make lint       ruff, formatting too          make typecheck  mypy --strict
#   make check      all of the above but the demo, as continuous integration runs them
#   make bench      the CPU benchmarks            make bench-gpu  the CUDA ones        make bench-tables  from results
#   make clean      remove .venv, .venv-newest, .venv-oldest and what runs have left

PYTHON ?= python3
VENV ?= .venv
# An exact version, installed before the package and named again with it: its extras then find torch in place, and no
# other build is fetched for what they depend on.
TORCH ?= torch==2.13.0
# Of the same index and in the same command as torch: one of another index fails with "operator torchvision::nms does
# not exist". For a machine without a GPU: make TORCH_INDEX=https://download.pytorch.org/whl/cpu test
TORCHVISION ?= torchvision==0.28.0
TORCH_INDEX ?=
NEWEST_TORCH ?= torch==2.15.0
OLDEST_TORCH ?= torch==2.11.0
ARGS ?=

PY := $(VENV)/bin/python
# Not --quiet, which would hide for a minute or more that anything is going on.
PIP := $(PY) -m pip install --disable-pip-version-check

# Kernels of small tests gain nothing from threads; processes that fight for cores lose a lot.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1); test $$n -gt 8 && echo 8 || echo $$n)
# Bytecode is kept: compiling the tests anew takes each worker 5 s.
RUN_TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1
# Whole files: what a file imports, compiles and starts is so once.
DIST ?= -n $(WORKERS) --dist loadfile
# What leans on torch's inside; no compilers, frameworks, pages and benchmarks.
NEWEST_TESTS := $(addprefix tests/,optimizer masters scaling grad_scaler model checkpoint session torch_internals autocast \
	distributed/test_fsdp.py distributed/test_ddp.py distributed/test_agreement.py promises/test_contract.py)
OLDEST_TESTS := $(addprefix tests/,optimizer masters scaling grad_scaler checkpoint session promises/test_contract.py)

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-newest test-oldest nightly docs package lines lint typecheck examples check clean

help:
	@sed -n '/^#  /s/^# *//p' Makefile

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mpinit needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	@echo "Installing into $(VENV); most of it is torch, which takes a minute or more on a fast line."
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@touch $@

$(VENV)/.torchvision: $(VENV)/.torch
	$(PIP) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)" "$(TORCHVISION)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) "$(TORCH)" --editable ".[demo]"
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(PIP) "$(TORCH)" --editable ".[test]"
	@touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(PIP) "$(TORCH)" --editable ".[docs]"
	@touch $@

$(VENV)/.dev: $(VENV)/.torchvision pyproject.toml
	$(PIP) "$(TORCH)" "$(TORCHVISION)" --editable ".[dev]"
	@touch $@ $(VENV)/.test $(VENV)/.demo $(VENV)/.docs $(VENV)/.bench

$(VENV)-newest/.test: OTHER_TORCH := $(NEWEST_TORCH)
$(VENV)-oldest/.test: OTHER_TORCH := $(OLDEST_TORCH)
$(VENV)-newest/.test $(VENV)-oldest/.test: $(VENV)-%/.test: pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check "$(OTHER_TORCH)" --editable ".[test]"
	@touch $@

$(VENV)/.bench: $(VENV)/.torch pyproject.toml
	$(PIP) "$(TORCH)" --editable ".[bench]"
	@touch $@

demo: $(VENV)/.demo
	@# Ctrl-C is no error: what was done by then is shown.
	@$(PY) examples/digits.py $(ARGS) || test $$? -eq 130

test: $(VENV)/.test
	$(RUN_TESTS) $(PY) -m pytest $(DIST) -m "not long" $(ARGS)

# In order: by their number of tests, files of one test that lasts minutes would be the last, on one worker.
test-long: $(VENV)/.dev
	$(RUN_TESTS) $(PY) -m pytest $(DIST) --no-loadscope-reorder -m long $(ARGS)

test-newest: $(VENV)-newest/.test
	$(RUN_TESTS) $(VENV)-newest/bin/python -m pytest $(DIST) -m "not long" $(NEWEST_TESTS) \
		--ignore tests/model/test_models_of_libraries.py $(ARGS)

test-oldest: $(VENV)-oldest/.test
	$(RUN_TESTS) $(VENV)-oldest/bin/python -m pytest $(DIST) -m "not long" $(OLDEST_TESTS) $(ARGS)

nightly: $(VENV)/.dev
	$(RUN_TESTS) $(PY) -m pytest -n $(WORKERS) -m nightly $(ARGS)

docs: $(VENV)/.docs
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet -b html docs runs/site
	@echo "The site: $(CURDIR)/runs/site/index.html"

package: $(VENV)/.dev
	$(PY) .ci/package.py runs/package

lines:
	@for folder in mpinit/*/ tests/*/ mpinit tests benchmarks docs examples; do \
		printf "%7d  %s\n" $$(find $$folder -name "*.py" -exec cat {} + | wc -l) $$folder; done

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

typecheck: $(VENV)/.dev
	$(PY) -m mypy --strict mpinit

examples: $(VENV)/.dev
	$(PY) examples/minimal.py
	$(PY) examples/digits.py --epochs 1 --width 4 --out runs/smoke
	$(PY) examples/why_did_my_step_skip.py --out runs/smoke
	$(PY) examples/other_optimizers.py --steps 20

check:
	.ci/run

clean:
	rm -rf $(VENV) $(VENV)-newest $(VENV)-oldest runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

-include benchmarks/bench.mk
