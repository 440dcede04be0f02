#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: on a CPU torch.prod multiplies in the tensor's dtype, and rounds after each factor. The product of 500
# numbers of 1.0078125 is 42 in bfloat16 and 45.2 in float16, where 49 is right. cumprod of the same numbers ends at
# 49, and so does scatter_reduce with "prod".
# Why it hurts: products of many factors near 1 are probabilities of sequences, light that passes the samples of a ray
# (NeRF), and determinants of flows. The error grows with the number of factors, and always has the same sign if they
# are alike. Code that compares cumprod(x)[-1] with prod(x) finds two numbers. Multiply in float32.
# Guess before the run: within 1 % of 49: reductions of 16-bit tensors accumulate in float32, as sum and cumprod do.
# Output seen on 2026-11-28: float32 48.963; bfloat16: prod 42.0, cumprod 49.0, scatter_reduce 49.0; float16: prod
# 45.188, cumprod 48.969, scatter_reduce 48.969
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch

found = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    x = torch.full((500,), 1.0078125, dtype=dtype)
    scattered = torch.ones(1, dtype=dtype).scatter_reduce_(0, torch.zeros(500, dtype=torch.long), x, "prod")
    found[dtype] = x.prod().item(), x.cumprod(0)[-1].item(), scattered.item()
    print(dtype, [round(number, 3) for number in found[dtype]])
low, half = found[torch.bfloat16], found[torch.float16]
right = abs(found[torch.float32][0] / 48.963 - 1) < 0.001 and all(abs(n / 48.963 - 1) < 0.01 for n in low[1:] + half[1:])
sys.exit(not (right and low[0] < 45 and half[0] < 47))
PY
