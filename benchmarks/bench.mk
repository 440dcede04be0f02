# Benchmarks; included by the top Makefile. Figures go to examples/benchmarks/results/.
#
# bench-gpu uses .venv where there is one and otherwise the machine's own python3 and torch: nothing is installed.

BENCH := examples.benchmarks
BENCH_VENV_PY := $(if $(VENV),$(VENV),.venv)/bin/python
BENCH_GPU_PY := $(if $(wildcard $(BENCH_VENV_PY)),$(BENCH_VENV_PY),python3)
BENCH_ARGS ?=

.PHONY: bench bench-gpu bench-quick bench-peers

bench: $(VENV)/.demo
	$(BENCH_VENV_PY) -m $(BENCH).run $(BENCH_ARGS)
	$(BENCH_VENV_PY) -m $(BENCH).memory
	$(BENCH_VENV_PY) -m $(BENCH).init_scale
	-test ! -f examples/benchmarks/o1_overhead.py || OMP_NUM_THREADS=1 $(BENCH_VENV_PY) -m $(BENCH).o1_overhead

bench-gpu:
	PYTHONPATH=.:$$PYTHONPATH $(BENCH_GPU_PY) -m $(BENCH).run --device cuda --limit-s 400 $(BENCH_ARGS)
	PYTHONPATH=.:$$PYTHONPATH $(BENCH_GPU_PY) -m $(BENCH).memory --device cuda

bench-quick: $(VENV)/.demo
	$(BENCH_VENV_PY) -m $(BENCH).run --quick $(BENCH_ARGS)
	$(BENCH_VENV_PY) -m $(BENCH).memory --quick
	$(BENCH_VENV_PY) -m $(BENCH).init_scale --quick

# Others' optimizers, measured too where they are installed.
bench-peers: $(VENV)/.demo
	$(BENCH_VENV_PY) -m pip install --quiet --disable-pip-version-check torch-optimi torchao "$(TORCH)"
