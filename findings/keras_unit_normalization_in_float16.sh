#!/usr/bin/env bash
# Packages: keras==3.15.1, jax==0.10.2, jaxlib==0.10.2
# What happens: keras.layers.UnitNormalization of float16, also under the policy mixed_float16, returns 0 for a vector
# of 8 numbers of 100, whose elements should be 0.354: the sum of squares is above 65,504. LayerNormalization and
# RMSNormalization of the same vector compute in float32 and are right. bfloat16 is right.
# Why it hurts: it is the last layer of models for embeddings and faces, under Keras's advice to use mixed_float16. A
# vector longer than 256 becomes 0 with a gradient of 0: no nan, no overflow for the loss scale to see, and a cosine of
# 0 to everything. Give this layer dtype="float32".
# Guess before the run: right within 0.01, as the other normalisation layers.
# Output seen on 2026-11-28: float32 0.354, bfloat16 0.354, float16 0.0, mixed_float16 0.0 with a gradient of 0.0; of
# numbers of 80: 0.354; LayerNormalization and RMSNormalization under mixed_float16 1.0 and 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check keras==3.15.1 jax==0.10.2 jaxlib==0.10.2
KERAS_BACKEND=jax "$folder/venv/bin/python" - <<'PY'
import sys
import jax
import jax.numpy as jnp
import keras


def norm(policy, size):
    layer = keras.layers.UnitNormalization(dtype=policy)
    return round(float(jnp.asarray(layer(jnp.full((1, 8), size)))[0, 0]), 3)


mixed = "mixed_float16"
found = {policy: norm(policy, 100.0) for policy in ("float32", "bfloat16", "float16", mixed)}
layer = keras.layers.UnitNormalization(dtype=mixed)
gradient = jax.grad(lambda x: jnp.asarray(layer(x))[0, 0].astype("float32"))(jnp.full((1, 8), 100.0))
others = []
for kind in (keras.layers.LayerNormalization, keras.layers.RMSNormalization):
    others.append(float(abs(jnp.asarray(kind(dtype=mixed)(jnp.array([[100.0, -100.0] * 4])))).max()))
print(found, "of 80:", norm(mixed, 80.0), "gradient", float(abs(gradient).max()), "others", others)
right = found["float32"] == 0.354 and abs(found["bfloat16"] - 0.354) < 0.002 and abs(norm(mixed, 80.0) - 0.354) < 0.002
wrong = found["float16"] == found[mixed] == 0 and float(abs(gradient).max()) == 0
sys.exit(not (right and wrong and all(abs(other - 1) < 0.01 for other in others)))
PY
