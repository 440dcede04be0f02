#!/usr/bin/env bash
# Packages: xarray==2026.9.0, dask==2026.8.0, numpy==2.4.6, pandas==3.1.1
# What happens: xarray's mean over the first dimension adds float16 numbers in float16, one after the other. The mean of
# 10,000 numbers around 1 is 0.47, and of 50,000 it is 0.16. np.mean of the same array is 1.00, mean(skipna=False) too,
# and so is the mean of the same DataArray in chunks of 1,000, where dask adds. A mean over all is inf.
# Why it hurts: statistics for the normalisation of inputs are computed over time or samples, which come first, of
# archives that are float16 to save space. 0.47 has the right size and sign, and chunked and loaded data differ, so that
# training is normalised by one number and evaluation by another. Pass dtype=np.float64, or skipna=False.
# Guess before the run: right within 1 %, as np.mean of float16, which adds in float32.
# Output seen on 2026-11-28: 10,000: xarray 0.469, skipna=False 1.001, dtype=float64 1.0, in chunks 1.002, NumPy 1.001;
# 50,000: 0.164, 1.003, 1.003, 1.005, 1.003; over all: xarray inf, NumPy 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check xarray==2026.9.0 dask==2026.8.0 \
    numpy==2.4.6 pandas==3.1.1
"$folder/venv/bin/python" - <<'PY'
import sys
import warnings
import numpy as np
import xarray

warnings.simplefilter("ignore")  # an overflow in the mean over all
generator, right = np.random.default_rng(0), True
for count in (10_000, 50_000):
    numbers = generator.normal(1, 0.5, (count, 8)).astype(np.float16)
    loaded = xarray.DataArray(numbers, dims=("time", "feature"))
    means = (
        loaded.mean("time"),
        loaded.mean("time", skipna=False),
        loaded.mean("time", dtype=np.float64),
        loaded.chunk(time=1_000).mean("time"),
        numbers.mean(0),
    )
    means = [round(float(np.asarray(mean)[0]), 3) for mean in means]
    everything = float(loaded.mean()), float(numbers.mean())
    print(count, "xarray, skipna=False, dtype=float64, in chunks, NumPy:", means, "over all:", everything)
    right &= means[0] < 0.6 and all(abs(mean - 1) < 0.02 for mean in means[1:]) and abs(everything[1] - 1) < 0.01
sys.exit(not right)
PY
