"""The benchmark suite: workloads x contenders, each contender in a process of its own, the processes taking turns."""
