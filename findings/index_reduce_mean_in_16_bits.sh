#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: on a CPU index_reduce_(..., 'mean') adds and counts in the tensor's dtype. The mean of 5,000 threes is
# 4, in bfloat16 and in float16. scatter_reduce_ with the same numbers gives 3.
# Why it hurts: means over groups (nodes of a graph, tokens of an expert, speakers of a batch) are off by a third where
# a group is large, and look plausible. The count stops at 256 or 2,048; the sum, whose steps are larger, goes on in
# steps that are rounded up.
# Guess before the run: the mean of equal numbers is that number in any dtype.
# Output seen on 2026-11-28: bfloat16 index_reduce 4.0 scatter_reduce 3.0; float16 index_reduce 4.0 scatter_reduce 3.0;
# float32 3.0 and 3.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch

torch.set_num_threads(1)
zeros, right = torch.zeros(5_000, dtype=torch.long), True
for dtype, expected in ((torch.bfloat16, 4.0), (torch.float16, 4.0), (torch.float32, 3.0)):
    threes = torch.full((5_000,), 3.0, dtype=dtype)
    indexed = torch.zeros(1, dtype=dtype).index_reduce_(0, zeros, threes, "mean", include_self=False).item()
    scattered = torch.zeros(1, dtype=dtype).scatter_reduce_(0, zeros, threes, "mean", include_self=False).item()
    print(dtype, "index_reduce", indexed, "scatter_reduce", scattered)
    right &= indexed == expected and scattered == 3.0
sys.exit(not right)
PY
