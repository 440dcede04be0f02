#!/usr/bin/env bash
# Packages: jax==0.10.2, jaxlib==0.10.2
# What happens: jnp.linalg.norm of 100,000 float16 ones is inf, although the norm is 316 and jnp.mean and jnp.sum of
# float16 accumulate in float32. The squares' sum is rounded to float16 before the root.
# Why it hurts: a gradient norm that is logged or clipped by in float16 is inf for any large layer; clipping by it
# makes the whole gradient 0 without an error.
# Guess before the run: the root is taken in float32, as torch.linalg.vector_norm does: 316.
# Output seen on 2026-11-28: float32 316.2 mean 1.0; float16 inf mean 1.0; clipped gradient 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
"$folder/venv/bin/python" - <<'PY'
import sys
import jax.numpy as jnp

ones = jnp.ones(100_000, jnp.float16)
wide, norm, mean = float(jnp.linalg.norm(ones.astype(jnp.float32))), float(jnp.linalg.norm(ones)), float(ones.mean())
clipped = float((ones * jnp.minimum(1.0, 1.0 / jnp.linalg.norm(ones)).astype(jnp.float16))[0])
print("float32", wide, "float16", norm, "mean", mean, "clipped gradient", clipped)
sys.exit(not (316 < wide < 317 and norm == float("inf") and mean == 1.0 and clipped == 0.0))
PY
