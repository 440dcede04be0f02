#!/usr/bin/env bash
# Packages: optax==0.2.8, jax==0.10.2, jaxlib==0.10.2
# What happens: optax.contrib.reduce_on_plateau averages the values of accumulation_size steps in the dtype of the
# parameters, although the values are Python floats. In bfloat16 the running mean of 512 losses moves in one direction
# only: of losses between 3 and 2 it is 2.0, and of those between 2 and 1 it is 1.0. While the loss falls steadily from
# 3 to 1 the rate is halved eight times, to 0.4 % of itself; in float32 and float16 it stays as it is. With an
# accumulation_size of 100 or 1 bfloat16 is right.
# Why it hurts: a training stops because it learns: a falling loss is taken for a plateau, and the loss curve that one
# looks at is the right one. accumulation_size is there for long epochs and noisy losses, so a short test passes.
# Initialise this transformation with float32 copies of the parameters.
# Guess before the run: the same scale in all dtypes, since a schedule keeps its few numbers in float32.
# Output seen on 2026-11-28: scale and best value: float32 1.0, 1.033; float16 1.0, 1.028; bfloat16 0.0039, 1.0; with
# an accumulation_size of 100: bfloat16 1.0, 1.023
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check optax==0.2.8 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import sys
import jax
import jax.numpy as jnp
import optax


def run(dtype, size, epochs=30):
    schedule = optax.contrib.reduce_on_plateau(factor=0.5, patience=3, accumulation_size=size)
    parameters = jnp.ones(4, dtype)
    state = schedule.init(parameters)
    step = jax.jit(lambda state, loss: schedule.update(parameters, state, parameters, value=loss)[1])
    for index in range(size * epochs):
        state = step(state, 3.0 - 2.0 * index / (size * epochs))
    return float(state.scale), float(state.best_value)


found = {dtype: run(dtype, 512) for dtype in (jnp.float32, jnp.float16, jnp.bfloat16)}
for dtype, numbers in found.items():
    print(jnp.dtype(dtype).name, "scale %.4f best %.3f" % numbers)
small = run(jnp.bfloat16, 100)
print("bfloat16, 100 values: scale %.4f best %.3f" % small)
others = found[jnp.float32][0] == found[jnp.float16][0] == small[0] == 1.0
sys.exit(not (others and found[jnp.bfloat16][0] < 0.1))
PY
