#!/usr/bin/env bash
# Packages: torchmetrics==1.9.0, torch==2.13.0, numpy
# What happens: torchmetrics computes r2_score and explained_variance as a sum of squares minus the square of a sum, in
# the dtype of its input. For 2,000 targets around 100 with a standard deviation of 1.4, r2_score is 0.98 in bfloat16,
# where 0.47 is right for the same numbers in float32; in float16 it is nan. pearson_corrcoef is nan in both.
# Why it hurts: 0.98 is a number that one wants to see. It is nearly the same for a bad model, so a search over
# hyperparameters compares noise. mean_squared_error and spearman_corrcoef of the same tensors are right. Call .float()
# on predictions and targets; at O2 and O5 the outputs of a model are float32.
# Guess before the run: within 0.02 of what float32 gives for the same, rounded numbers, since metrics are where one
# spends the bits.
# Output seen on 2026-11-28: bfloat16: r2_score 0.984 (float32 of the same numbers 0.469), explained_variance 0.984
# (0.469), pearson_corrcoef nan (0.686); float16: nan (0.505), nan (0.506), nan (0.712)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torchmetrics==1.9.0 torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import sys
import torch
from torchmetrics.functional import explained_variance, pearson_corrcoef, r2_score

found = {}
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    guessed = (torch.randn(2_000) + 100).to(dtype)
    target = (guessed.float() + torch.randn(2_000)).to(dtype)
    for score in (r2_score, explained_variance, pearson_corrcoef):
        pair = score(guessed, target).item(), score(guessed.float(), target.float()).item()
        found[dtype, score] = pair
        print(dtype, score.__name__, [round(number, 3) for number in pair])
low, half = (found[dtype, r2_score] for dtype in (torch.bfloat16, torch.float16))
right = found[torch.float32, r2_score][0] == found[torch.float32, r2_score][1] and 0.4 < low[1] < 0.6
is_nan = half[0] != half[0] and found[torch.bfloat16, pearson_corrcoef][0] != found[torch.bfloat16, pearson_corrcoef][0]
sys.exit(not (right and low[0] > 0.9 and is_nan))
PY
