#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: torch.nanmean of 100,000 float16 ones is inf, where torch.mean of them is 1: nanmean rounds the sum to
# float16 before it divides.
# Why it hurts: a masked loss or metric that writes nan for what does not count, and averages the rest with nanmean, is
# inf from 65,520 elements of 1 on, and the step is skipped or spoiled, although every number is small.
# Guess before the run: nanmean divides in float32, as mean does: 1.
# Output seen on 2026-11-28: mean 1.0 nanmean inf, of 60,000: nanmean 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch

many = torch.ones(100_000, dtype=torch.float16)
mean, nanmean, fewer = many.mean().item(), many.nanmean().item(), many[:60_000].nanmean().item()
print("mean", mean, "nanmean", nanmean, "of 60,000: nanmean", fewer)
sys.exit(not (mean == 1.0 and nanmean == float("inf") and fewer == 1.0))
PY
