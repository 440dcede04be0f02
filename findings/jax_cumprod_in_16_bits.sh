#!/usr/bin/env bash
# Packages: jax==0.10.2, jaxlib==0.10.2
# What happens: on a CPU jnp.cumprod multiplies in the array's dtype. The product of 500 numbers of 1.0078125 is 39.25
# in bfloat16 and 47.9 in float16, where 49 is right. jnp.prod of the same numbers is 49, and jnp.cumsum of 16-bit
# numbers is right. torch (2.13) has it the other way round: cumprod is right, and prod is not.
# Why it hurts: cumulative products of numbers near 1 are the noise schedules of diffusion models, the light that is
# left along a ray, and discounts of rewards. The last element differs from prod by a fifth.
# Guess before the run: 49 within 2 %, in both, because jnp.cumsum and jnp.prod accumulate in float32.
# Output seen on 2026-11-28: float32 prod 48.963 cumprod 48.963; bfloat16 49.0, 39.25; float16 48.969, 47.938
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
"$folder/venv/bin/python" - <<'PY'
import sys
import jax.numpy as jnp

found = {}
for dtype in ("float32", "bfloat16", "float16"):
    numbers = jnp.full(500, 1.0078125, dtype)
    found[dtype] = float(jnp.prod(numbers)), float(jnp.cumprod(numbers)[-1]), float(jnp.cumsum(numbers)[-1])
    print(dtype, "prod, cumprod, cumsum:", [round(number, 3) for number in found[dtype]])
right = all(abs(each[0] / 48.963 - 1) < 0.01 and abs(each[2] / 503.9 - 1) < 0.01 for each in found.values())
sys.exit(not (right and found["bfloat16"][1] < 44 and found["float16"][1] < 48.5))
PY
