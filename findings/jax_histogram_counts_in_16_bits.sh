#!/usr/bin/env bash
# Packages: jax==0.10.2, jaxlib==0.10.2
# What happens: jnp.histogram counts in the dtype of its numbers: of 5,000 zeros a bin counts 256 in bfloat16 and
# 2,048 in float16. jnp.median of two float16 numbers of 60,000 and 65,000 is inf, where jnp.mean and jnp.percentile
# of them are 62,500.
# Why it hurts: histograms of bfloat16 activations and gradients are logged, and used to calibrate quantisation: the
# tall bins, which are the ones around 0, are cut at 256, and the rest looks like heavy tails.
# Guess before the run: counts are integers or float32: 5,000; the median is 62,500.
# Output seen on 2026-11-28: float32 5000.0, float16 2048.0, bfloat16 256.0; median inf, mean and percentile 62496
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
"$folder/venv/bin/python" - <<'PY'
import sys
import jax.numpy as jnp

counts = {dtype.__name__: float(jnp.histogram(jnp.zeros(5_000, dtype), bins=1)[0][0]) for dtype in
          (jnp.float32, jnp.float16, jnp.bfloat16)}
pair = jnp.asarray([60_000, 65_000], jnp.float16)
median, mean, half = float(jnp.median(pair)), float(jnp.mean(pair)), float(jnp.percentile(pair, 50))
print(counts, "median", median, "mean", mean, "percentile", half)
right = counts == {"float32": 5000.0, "float16": 2048.0, "bfloat16": 256.0}
sys.exit(not (right and median == float("inf") and mean == half == 62_496))
PY
