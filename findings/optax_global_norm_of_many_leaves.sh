#!/usr/bin/env bash
# Packages: optax==0.2.8, jax==0.10.2, jaxlib==0.10.2
# What happens: optax.global_norm adds the squares of the leaves' norms in the leaves' dtype, one leaf after the other.
# With 2,000 bfloat16 leaves of norm 1 it is 16, where 44.7 is right; clip_by_global_norm(1.0) then leaves a norm of
# 2.8.
# Why it hurts: models with bfloat16 gradients and many small leaves (biases, norms, adapters) are clipped too little,
# by a factor that grows with their depth, and logs show a gradient norm that never exceeds 16.
# Guess before the run: the sum of squares over leaves is float32, as in torch's clip_grad_norm_ over float32 norms:
# 44.7.
# Output seen on 2026-11-28: bfloat16 16.0 after clipping 2.80; float32 44.72 after clipping 1.00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check optax==0.2.8 jax==0.10.2 jaxlib==0.10.2
"$folder/venv/bin/python" - <<'PY'
import sys
import jax.numpy as jnp
import numpy as np
import optax

found = {}
for dtype in (jnp.bfloat16, jnp.float32):
    leaves = [jnp.ones(1, dtype)] * 2_000
    norm = float(optax.global_norm(leaves))
    clip = optax.clip_by_global_norm(1.0)
    clipped, _ = clip.update(leaves, clip.init(leaves))
    after = float(np.sqrt(sum(float(leaf[0]) ** 2 for leaf in clipped)))
    found[dtype.__name__] = norm, after
    print(dtype.__name__, norm, "after clipping", round(after, 2))
sys.exit(not (found["bfloat16"][0] == 16 and found["bfloat16"][1] > 2.5 and abs(found["float32"][0] - 44.72) < 0.01))
PY
