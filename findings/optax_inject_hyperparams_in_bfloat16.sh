#!/usr/bin/env bash
# Packages: optax==0.2.8, jax==0.10.2, jaxlib==0.10.2
# What happens: optax.inject_hyperparams casts every hyperparameter to the highest dtype of the parameters. If all are
# bfloat16, adam's b2 of 0.999 becomes 1.0 and its first step is nan. rmsprop with a decay of 0.999 moves a weight by 20
# in 20 steps, where 0.24 is right, and stays finite. The same optimizers without inject_hyperparams are right, and so
# are all of them as soon as a single parameter is float32.
# Why it hurts: inject_hyperparams is how a rate is logged, changed by hand or scheduled, and believed to change nothing
# else. Configurations differ in what nobody compares: b1 is 0.898, b2 of 0.95 is 0.949, and a model whose norms are
# float32 trains where the same one with norms in bfloat16 does not. Pass hyperparam_dtype=jnp.float32.
# Guess before the run: hyperparameters stay float32, and the weights are as without the wrapper within 1 %.
# Output seen on 2026-11-28: moved by adam alone -0.0197, injected nan, with hyperparam_dtype -0.0199; rmsprop alone
# -0.2385, injected -20.01, with hyperparam_dtype -0.2395; b1 0.8984, b2 1.0; beside a float32 parameter -0.0199 and
# -0.2395
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


def moved(optimizer, **more):
    parameters = {"weight": jnp.full(64, 0.01, jnp.bfloat16), **more}
    state = optimizer.init(parameters)
    gradients = jax.tree.map(lambda parameter: jnp.full_like(parameter, 0.1), parameters)
    step = jax.jit(optimizer.update)
    for _ in range(20):
        updates, state = step(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    if hasattr(state, "hyperparams"):
        print({name: round(float(value), 4) for name, value in state.hyperparams.items()})
    return round(float(parameters["weight"][0]) - 0.01, 4)


found = {}
for kind, settings in ((optax.adam, {"b2": 0.999}), (optax.rmsprop, {"decay": 0.999})):
    alone = moved(kind(1e-3, **settings))
    injected = moved(optax.inject_hyperparams(kind)(learning_rate=1e-3, **settings))
    wide = moved(optax.inject_hyperparams(kind, hyperparam_dtype=jnp.float32)(learning_rate=1e-3, **settings))
    beside = moved(optax.inject_hyperparams(kind)(learning_rate=1e-3, **settings), norm=jnp.ones(4))
    found[kind] = alone, injected, wide, beside
    print(kind.__name__, "alone, injected, hyperparam_dtype, beside a float32 parameter:", found[kind])
right = all(abs(other / alone - 1) < 0.1 for alone, _, *others in found.values() for other in others)
adam, rmsprop = found[optax.adam], found[optax.rmsprop]
sys.exit(not (right and adam[1] != adam[1] and rmsprop[1] < 10 * rmsprop[0]))
PY
