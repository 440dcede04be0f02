#!/usr/bin/env bash
# Packages: mlx[cpu]==0.32.4
# What happens: on its CPU backend mlx's mean, var and linalg.norm of float16 overflow where the result is small: the
# mean of 100,000 ones is inf. Sums are rounded to float16 before the division.
# Why it hurts: a mean loss over a float16 batch, or the norm of a float16 gradient, is inf from 65,520 on, where
# PyTorch and JAX return 1: a loop that is moved to mlx skips or spoils every step.
# Guess before the run: reductions of 16-bit arrays accumulate in float32, and mean divides before it rounds: 1.
# Output seen on 2026-11-28: float32 mean 1.0 norm 316.2; float16 mean inf norm inf; bfloat16 mean 1.0 norm 316.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check mlx[cpu]==0.32.4
"$folder/venv/bin/python" - <<'PY'
import sys
import mlx.core as mx

mx.set_default_device(mx.cpu)
found = {}
for dtype in (mx.float32, mx.float16, mx.bfloat16):
    ones = mx.ones((100_000,), dtype)
    found[dtype] = mx.mean(ones).item(), mx.linalg.norm(ones).item()
    print(dtype, "mean", found[dtype][0], "norm", found[dtype][1])
infinite = float("inf")
sys.exit(not (found[mx.float16] == (infinite, infinite) and found[mx.float32][0] == 1.0))
PY
