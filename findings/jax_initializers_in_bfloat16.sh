#!/usr/bin/env bash
# Packages: flax==0.12.8, jax==0.10.2, jaxlib==0.10.2
# What happens: normal numbers of jax.random in bfloat16 have a mean of -1.2 % of their standard deviation, and the
# weights of jax.nn.initializers one of -1.3 % (uniform) to -1.8 % (normal). They are made of multiples of 1 / 128 that
# are rounded down. The bias adds up over the inputs of a layer: a flax layer of 4,096 inputs has outputs of mean
# -0.90 and standard deviation 1.01, and 19 % of them are positive instead of 47 %. Of a million normal numbers the
# largest is 2.52, where 4.5 is right.
# Why it hurts: param_dtype=bfloat16 is how large models fit into memory. Wide layers behind a relu or gelu then start
# with most of their units off, more so the wider they are, and a small test model shows nothing. The noise of a
# diffusion model, drawn in the dtype of its latents, has no tails. Initialise and draw in float32, and cast.
# Guess before the run: means within 1 % of the standard deviation: the coarse uniform numbers of 16-bit dtypes matter
# to bernoulli alone, and mean and standard deviation stay right.
# Output seen on 2026-11-28: mean of weights, outputs, positive, normal: float32 0.0003, -0.04 +- 1.02, 0.472, -4.65 to
# 4.52; float16 -0.0023, -0.16 +- 0.99, 0.433, -3.49 to 3.18; bfloat16 -0.0180, -0.90 +- 1.01, 0.185, -2.89 to 2.52
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check flax==0.12.8 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import sys
import jax
import jax.numpy as jnp
from flax import nnx

found = {}
for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
    weights = jax.nn.initializers.lecun_normal()(jax.random.key(0), (1_000, 1_000), dtype).astype(jnp.float32)
    layer = nnx.Linear(4_096, 256, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    inputs = jnp.abs(jax.random.normal(jax.random.key(1), (64, 4_096), jnp.float32)).astype(dtype)
    outputs = layer(inputs).astype(jnp.float32)
    noise = jax.random.normal(jax.random.key(0), (1_000_000,), dtype).astype(jnp.float32)
    found[dtype] = (
        float(weights.mean() / weights.std()),
        float(outputs.mean()),
        float(outputs.std()),
        float((outputs > 0).mean()),
        float(noise.min()),
        float(noise.max()),
    )
    text = "mean of weights %.4f outputs %.2f +- %.2f positive %.3f normal %.2f to %.2f"
    print(jnp.dtype(dtype).name, text % found[dtype])
right, low = found[jnp.float32], found[jnp.bfloat16]
as_expected = abs(right[0]) < 0.005 and abs(right[1]) < 0.2 and right[5] > 4
sys.exit(not (as_expected and low[0] < -0.01 and low[1] < -0.5 and low[5] < 3))
PY
