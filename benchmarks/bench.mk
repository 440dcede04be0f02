# Benchmarks; included by the top Makefile. Figures go to benchmarks/results/<machine>/.
#
# A stopped run continues: a workload with results of the present sources is not measured again, unless
# BENCH_ARGS=--fresh. bench-gpu uses .venv if there is one, otherwise the machine's own python3. It installs nothing:
# pyperf, matplotlib and tqdm have to be installed.

BENCH_PY := $(if $(VENV),$(VENV),.venv)/bin/python
BENCH_GPU_PY := $(if $(wildcard $(BENCH_PY)),$(BENCH_PY),python3)
BENCH_ARGS ?=

.PHONY: bench bench-loops bench-gpu bench-quick bench-native bench-tables bench-peers bench-states

# Builds mpinit's native code for the CPU first, as `mpinit build-native` does.
bench: $(VENV)/.bench
	$(BENCH_PY) -m benchmarks run $(BENCH_ARGS)
	$(BENCH_PY) -m benchmarks tables

# Loops with clipping, schedulers, averages and so on, beside the same loops written by hand.
bench-loops: $(VENV)/.bench
	$(BENCH_PY) -m benchmarks run --targets bench-loops $(BENCH_ARGS)
	$(BENCH_PY) -m benchmarks tables

bench-gpu:
	PYTHONPATH=.:$$PYTHONPATH $(BENCH_GPU_PY) -m benchmarks run --device cuda $(BENCH_ARGS)
	PYTHONPATH=.:$$PYTHONPATH $(BENCH_GPU_PY) -m benchmarks tables

# Tiny sizes, to test that everything runs.
bench-quick: $(VENV)/.bench
	$(BENCH_PY) -m benchmarks run --quick --fresh --targets bench bench-loops $(BENCH_ARGS)

# Steps with and without native code, for docs/how-to/memory.md.
bench-native: $(VENV)/.bench
	$(BENCH_PY) -m benchmarks run --targets bench-native $(BENCH_ARGS)

# Every table and picture of README and the documentation, from the committed results. Two are measured again, in
# seconds.
bench-tables: $(VENV)/.bench
	$(BENCH_PY) -m benchmarks tables
	$(BENCH_PY) docs/figures.py

# Other packages' optimizers; `make bench` measures those that are installed.
bench-peers: $(VENV)/.bench
	$(BENCH_PY) -m pip install --quiet --disable-pip-version-check torch-optimi torchao bitsandbytes "$(TORCH)"

# Final loss with encoded optimizer states.
bench-states: $(VENV)/.bench
	$(BENCH_PY) -m benchmarks.states $(BENCH_ARGS)
