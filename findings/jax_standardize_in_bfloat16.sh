#!/usr/bin/env bash
# Packages: jax==0.10.2, jaxlib==0.10.2
# What happens: jax.nn.standardize of 300, 301, 302 and 303 is up to 632 in bfloat16, where 1.34 is right, and nan in
# float16: its variance is the mean of squares minus the square of the mean in the input's dtype, which is 0, so that
# numbers are divided by the root of epsilon. jnp.var of the same numbers is right.
# Why it hurts: it is the function of jax.nn for layer norms by hand. The result is finite and looks like large
# activations; a row is blown up by 300 only where its mean is large beside its spread, so a test with normal numbers
# passes.
# Guess before the run: the statistics are computed in float32, as in jnp.var: 1.34.
# Output seen on 2026-11-28: float32 1.34, float16 nan, bfloat16 632.0; without their mean bfloat16 1.34; root of
# jnp.var in bfloat16 1.66
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
"$folder/venv/bin/python" - <<'PY'
import sys
import jax
import jax.numpy as jnp

row, found = jnp.asarray([300.0, 301.0, 302.0, 303.0]), {}
for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
    found[dtype.__name__] = float(jax.nn.standardize(row.astype(dtype)).astype(jnp.float32).max())
usual = float(jax.nn.standardize((row - 301.5).astype(jnp.bfloat16)).astype(jnp.float32).max())
deviation = float(jnp.sqrt(jnp.var(row.astype(jnp.bfloat16))).astype(jnp.float32))
print(found, "without the mean", usual, "root of jnp.var", deviation)
wide, half, brain = found["float32"], found["float16"], found["bfloat16"]
sys.exit(not (1.3 < wide < 1.4 and half != half and brain > 100 and 1.2 < usual < 1.5 and 1 < deviation < 2))
PY
