#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: on a CPU nn.EmbeddingBag(mode="mean") of float16 sums a bag in float16 and divides afterwards: the mean
# of 1,000 rows of 100 is inf. torch.mean and avg_pool1d of the same rows are 100.
# Why it hurts: mean is the default mode, for bags of any length: words of a text, clicks of a user. A long bag becomes
# inf where a short one is right, so a model that was tested on short ones returns nan for its most active users. In
# training the loss scale comes down for nothing. In bfloat16 the mean is right, and at O2 as well.
# Guess before the run: 100: the mean is a mean, and kernels of pooling add in float32.
# Output seen on 2026-11-28: float32 100.0, bfloat16 100.0, float16 inf; of 600 rows in float16 100.0; mean 100.0,
# avg_pool1d 100.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch
from torch import nn


def mean_of(dtype, length):
    bag = nn.EmbeddingBag(4, 8)  # its default mode is "mean"
    nn.init.constant_(bag.weight, 100.0)
    return bag.to(dtype)(torch.zeros(1, length, dtype=torch.long))[0, 0].item()


half = torch.float16
rows = torch.full((1_000, 8), 100.0, dtype=half)
found = {dtype: mean_of(dtype, 1_000) for dtype in (torch.float32, torch.bfloat16, half)}
short, mean = mean_of(half, 600), rows.mean(0)[0].item()
pooled = nn.functional.avg_pool1d(rows.T[None], 1_000)[0, 0].item()
print(found, "of 600 rows", short, "mean", mean, "avg_pool1d", pooled)
right = found[torch.float32] == found[torch.bfloat16] == short == mean == pooled == 100
sys.exit(not (right and found[half] == float("inf")))
PY
