#!/usr/bin/env bash
# Packages: jax==0.10.2, jaxlib==0.10.2
# What happens: jax.random.bernoulli compares with uniform numbers of the dtype of p. In bfloat16 these are multiples of
# 1 / 128, so that an event of probability 0.001 happens in 0.77 % of the draws, nearly 8 times too often, and one of
# 0.999 always. In float16 0.001 happens twice as often.
# Why it hurts: a probability that a bfloat16 network computes (a gate, a stopping decision, a mask of what to keep) is
# rounded up to steps of 0.8 % in what is sampled, while its log-probability in the loss is that of 0.001. Rare events
# are the ones that matter in exploration and in rates of masking. Pass p.astype(float32).
# Guess before the run: the frequency is p within 2 %, and within 0.1 % of 0.999.
# Output seen on 2026-11-28: p = 0.001: float32 0.00099, float16 0.00196, bfloat16 0.00771; p = 0.999: 0.99906, 0.99896,
# 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import sys
import jax
import jax.numpy as jnp

key = jax.random.key(0)
found = {}
for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
    for p in (0.001, 0.999):
        found[dtype, p] = round(float(jax.random.bernoulli(key, dtype(p), (1_000_000,)).mean()), 5)
    print(dtype.__name__, [found[dtype, p] for p in (0.001, 0.999)])
right = abs(found[jnp.float32, 0.001] - 0.001) < 1e-4
sys.exit(not (right and found[jnp.float16, 0.001] > 0.0015 and found[jnp.bfloat16, 0.001] > 0.005 and found[jnp.bfloat16, 0.999] == 1))
PY
