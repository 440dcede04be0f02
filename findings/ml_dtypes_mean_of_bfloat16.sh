#!/usr/bin/env bash
# Packages: ml_dtypes==0.6.0, numpy==2.4.6
# What happens: np.sum, np.mean and np.var of an array of ml_dtypes' bfloat16 add in bfloat16, one number after the
# other. A sum of ones stops at 256, so the mean of 10,000 ones is 0.0256, while the product of the same vector with
# itself is exact.
# Why it hurts: who checks a bfloat16 checkpoint in NumPy (mean, standard deviation, norm of a layer) reads numbers
# that are wrong by a factor of 40, and compares or rescales weights by them. Cast to float32 first.
# Guess before the run: NumPy adds pairwise and in a wider type, as it does for float16 (np.mean): the mean is 1.
# Output seen on 2026-11-28: sum 256, mean 0.0256348, dot 10000, float16 mean 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import sys
import ml_dtypes
import numpy as np

ones = np.ones(10_000, ml_dtypes.bfloat16)
total, mean, dot = float(ones.sum()), float(ones.mean()), float(ones @ ones)
half = float(np.ones(10_000, np.float16).mean())
print("sum", total, "mean", mean, "dot", dot, "float16 mean", half)
sys.exit(not (total == 256 and mean < 0.03 and dot > 9_900 and half == 1.0))
PY
