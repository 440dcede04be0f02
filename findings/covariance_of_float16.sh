#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: torch.cov of 100,000 samples of float16 has inf on its diagonal, and torch.corrcoef nan: the products
# are summed over samples and rounded to float16 before the division by their number. torch.var of the same numbers is
# 1.
# Why it hurts: whitening, feature statistics (as for FID) and decorrelation losses (Barlow Twins, VICReg) use
# covariances of many samples. Off the diagonal the numbers look right, since there the sums are small; a loss on the
# off-diagonal elements trains while the normalisation in it is inf.
# Guess before the run: the number of samples divides in float32, as in torch.var: 1 on the diagonal.
# Output seen on 2026-11-28: float32 diagonal 1.00; float16 diagonal inf, off the diagonal -0.005, var 1.00; corrcoef
# nan; with 50,000 samples 1.00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch

torch.manual_seed(0)
samples = torch.randn(2, 100_000)
half = samples.half()
wide, found, fewer = torch.cov(samples), torch.cov(half), torch.cov(half[:, :50_000])
related, variance = torch.corrcoef(half)[0, 0].item(), half.var().item()
print("float32", wide[0, 0].item(), "float16", found.tolist(), "var", variance)
print("corrcoef", related, "of 50,000", fewer[0, 0].item())
right = 0.9 < wide[0, 0] < 1.1 and 0.9 < variance < 1.1 and 0.9 < fewer[0, 0] < 1.1
sys.exit(not (right and found.diagonal().isinf().all() and found[0, 1].isfinite() and related != related))
PY
