# Benchmarks; included by the top Makefile. Figures go to benchmarks/results/cpu/ and benchmarks/results/cuda/.
#
# bench-gpu uses .venv if there is one, otherwise the machine's own python3, and installs nothing.

# One thread, one arena, and no memory returned to the system: otherwise the allocator changes times by up to 2x.
BENCH_ENV := OMP_NUM_THREADS=1 MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=-1 \
	TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONPATH=.
BENCH_GPU_PY := $(if $(wildcard $(PY)),$(PY),python3)
BENCH_ARGS ?=

.PHONY: bench bench-gpu bench-quick bench-tables

# Tables are made also where the machine was not quiet for some of the figures, whose files stay what they were.
bench: $(VENV)/.bench
	$(BENCH_ENV) $(PY) -m benchmarks run $(BENCH_ARGS); status=$$?; $(PY) -m benchmarks tables; exit $$status

bench-gpu:
	$(BENCH_ENV) $(BENCH_GPU_PY) -m benchmarks run --device cuda $(BENCH_ARGS)
	PYTHONPATH=. $(BENCH_GPU_PY) -m benchmarks tables

bench-quick: $(VENV)/.bench
	$(BENCH_ENV) $(PY) -m benchmarks run --quick --rounds 2 --out runs/bench $(BENCH_ARGS)

# Every table of README and the pages, from the committed results.
bench-tables: $(VENV)/.bench
	$(PY) -m benchmarks tables
	$(PY) docs/masters_figure.py
