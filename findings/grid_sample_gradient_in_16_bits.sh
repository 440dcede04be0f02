#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: on a CPU the gradient of grid_sample for its input is added in the input's dtype: a pixel that 5,000
# samples read gets 256 in bfloat16 and 2,048 in float16. interpolate, gather and expand sum the same gradients right.
# Why it hurts: spatial transformers and deformable sampling often read a few pixels very often (a border, a zoomed
# region): exactly these get a fraction of their gradient.
# Guess before the run: the backward pass sums in float32, as that of interpolate does: 4,992 and 5,000.
# Output seen on 2026-11-28: bfloat16 grid_sample 256.0 interpolate 4992.0; float16 grid_sample 2048.0 interpolate
# 5000.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch
from torch.nn import functional as F

torch.set_num_threads(1)
right = True
for dtype, stop in ((torch.bfloat16, 256), (torch.float16, 2_048)):
    pixel = torch.ones(1, 1, 1, 1, dtype=dtype, requires_grad=True)
    grid = torch.zeros(1, 1, 5_000, 2, dtype=dtype)
    sampled = torch.autograd.grad(F.grid_sample(pixel, grid, align_corners=True).sum(), pixel)[0].item()
    resized = torch.autograd.grad(F.interpolate(pixel[0], size=5_000, mode="nearest").sum(), pixel)[0].item()
    print(dtype, "grid_sample", sampled, "interpolate", resized)
    right &= sampled == stop and resized > 4_900
sys.exit(not right)
PY
