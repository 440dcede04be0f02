#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: torch.func.jvp of torch.linalg.vector_norm in float16 is inf where the backward pass of the same
# function is right: for 100,000 ones the forward derivative in the direction of ones is 316, and the sum of products
# before it is divided by the norm is rounded to float16. The value itself, and the gradient of torch.func.grad, are
# right.
# Why it hurts: forward-mode derivatives are what Hessian-vector products (jvp of grad), forward gradients and
# linearised models use. A code that was tested with backward passes alone fails, with the same function and the same
# numbers.
# Guess before the run: the forward derivative is computed as carefully as the value: 316.
# Output seen on 2026-11-28: float32 316.2; float16: value 316.2, jvp inf, sum of the gradient times ones 316.2;
# bfloat16 jvp 316.0
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
    ones = torch.ones(100_000, dtype=dtype)
    value, forward = torch.func.jvp(torch.linalg.vector_norm, (ones,), (ones,))
    backward = torch.func.grad(torch.linalg.vector_norm)(ones).double().sum().item()
    found[dtype] = value.item(), forward.item(), backward
    print(dtype, "value, jvp, gradient times ones:", found[dtype])
half, wide = found[torch.float16], found[torch.float32]
sys.exit(not (316 < half[0] < 317 and half[1] == float("inf") and 310 < half[2] < 320 and 316 < wide[1] < 317))
PY
