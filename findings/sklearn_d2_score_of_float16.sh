#!/usr/bin/env bash
# Packages: scikit-learn==1.9.1, numpy==2.4.6, scipy==1.17.1
# What happens: scikit-learn's d2_absolute_error_score of 20,000 float16 numbers is 0.57 for predictions that deserve
# 0.10, and 0.76 for 0.50. It compares with the error of predicting the median, and finds the median by adding weights
# of 1 in float16. The sum stops at 2,048, so the "median" is a number that a twentieth of the targets is below. Nothing
# overflows, and nothing warns. r2_score and np.median of the same arrays are right, and so is the score of 2,000.
# Why it hurts: predictions and targets of a float16 model are scored as they come. The score is too high, rises with
# the size of the validation set, and differs too little between models: a useless model looks like a fair one. Cast one
# of the two arrays to float32.
# Guess before the run: right within 1 %: scikit-learn computes scores in float64, as its StandardScaler does.
# Output seen on 2026-11-28: noise 0.25, 0.5, 0.9: float16 0.879, 0.763, 0.573; float64 of the same numbers 0.748, 0.5,
# 0.097; of 2,000 numbers 0.496 and 0.496; r2_score 0.164 and 0.163
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check scikit-learn==1.9.1 numpy==2.4.6 \
    scipy==1.17.1
"$folder/venv/bin/python" - <<'PY'
import sys
import numpy as np
from sklearn.metrics import d2_absolute_error_score, r2_score

generator = np.random.default_rng(0)


def scores(score, count, noise):
    targets = generator.normal(0, 1, count).astype(np.float16)
    predictions = (targets + generator.normal(0, noise, count)).astype(np.float16)
    wide = targets.astype(np.float64), predictions.astype(np.float64)
    return round(float(score(targets, predictions)), 3), round(float(score(*wide)), 3)


found = [scores(d2_absolute_error_score, 20_000, noise) for noise in (0.25, 0.5, 0.9)]
few = scores(d2_absolute_error_score, 2_000, 0.5)
other = scores(r2_score, 20_000, 0.9)
print("float16 and float64:", *found, "of 2,000 numbers:", few, "r2_score:", other)
right = abs(few[0] - few[1]) < 0.01 and abs(other[0] - other[1]) < 0.01
sys.exit(not (right and all(half > wide + 0.1 for half, wide in found)))
PY
