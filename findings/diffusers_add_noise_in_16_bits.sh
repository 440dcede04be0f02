#!/usr/bin/env bash
# Packages: diffusers==0.42.1, torch==2.13.0, numpy
# What happens: DDPMScheduler.add_noise casts its table of products to the dtype of the samples before it subtracts it
# from 1. In bfloat16 the first products are all 1, so at the timesteps 0 to 5 no noise is added at all; in float16 at
# 0 and 1.
# Why it hurts: a model that trains on bfloat16 latents is asked, at these steps, to predict noise that is not in its
# input. Nothing warns, and the loss of these steps cannot fall. Call add_noise on float32 latents and cast what comes
# out.
# Guess before the run: the table stays float32 and only the result is cast, so that step 0 has noise of standard
# deviation 0.01 in every dtype.
# Output seen on 2026-11-28: float32 [0.0099, 0.0147, 0.0298]; float16 [0.0, 0.0, 0.031]; bfloat16 [0.0, 0.0, 0.0] at
# the timesteps 0, 1 and 5
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check diffusers==0.42.1 torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch
from diffusers import DDPMScheduler

scheduler = DDPMScheduler()
torch.manual_seed(0)
noise = torch.randn(4096)
found = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    clean = torch.zeros(4096, dtype=dtype)
    noisy = [scheduler.add_noise(clean, noise.to(dtype), torch.tensor(step)) for step in (0, 1, 5)]
    found[dtype] = [round(each.float().std().item(), 4) for each in noisy]
    print(dtype, found[dtype])
exact = all(value > 0.005 for value in found[torch.float32])
sys.exit(not (exact and found[torch.bfloat16] == [0.0, 0.0, 0.0] and found[torch.float16][:2] == [0.0, 0.0]))
PY
