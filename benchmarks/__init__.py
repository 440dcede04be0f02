"""The benchmark suite: workloads x contenders, each in fresh processes that take turns; see benchmarks/README.md."""
