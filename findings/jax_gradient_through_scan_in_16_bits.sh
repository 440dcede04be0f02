#!/usr/bin/env bash
# Packages: jax==0.10.2, jaxlib==0.10.2
# What happens: the gradient of an array that every step of jax.lax.scan uses is added over steps in the array's
# dtype: 5,000 steps with a gradient of 1 give 256 in bfloat16 and 2,048 in float16. The same loop as vmap or
# broadcasting gives 4,992 and 5,000.
# Why it hurts: weights of recurrent networks, of weight-tied layers and of losses over chunks are such arrays. What
# is lost depends on the number of steps alone, so a longer sequence trains these weights less, while the weights
# beside the loop get their whole gradient.
# Guess before the run: the sum over steps is one reduction in float32 that is rounded once: 4,992 and 5,000.
# Output seen on 2026-11-28: float32 scan 5000 vmap 5000; float16 scan 2048 vmap 5000; bfloat16 scan 256 vmap 4992
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
"$folder/venv/bin/python" - <<'PY'
import sys
import jax
import jax.numpy as jnp


def by_scan(weight, inputs):
    return jax.lax.scan(lambda carry, x: (carry, x * weight), 0.0, inputs)[1].astype(jnp.float32).sum()


def by_vmap(weight, inputs):
    return jax.vmap(lambda x: x * weight)(inputs).astype(jnp.float32).sum()


found = {}
for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
    one, inputs = jnp.ones((), dtype), jnp.ones(5_000, dtype)
    found[dtype.__name__] = float(jax.grad(by_scan)(one, inputs)), float(jax.grad(by_vmap)(one, inputs))
print(found)
sys.exit(found != {"float32": (5000.0, 5000.0), "float16": (2048.0, 5000.0), "bfloat16": (256.0, 4992.0)})
PY
