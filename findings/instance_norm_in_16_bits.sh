#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: on a CPU InstanceNorm with 16-bit input, and BatchNorm whose weights are 16-bit too, subtract a mean
# that is rounded to 16 bits. For numbers around 100.3 with a standard deviation of 1 the output, whose mean has to be
# 0, has a mean of 0.38 in bfloat16 and 0.05 in float16. GroupNorm with a group for each channel, which is the same
# function, has 0.002 and 0.0002.
# Why it hurts: the shift depends on the sample, and is largest for channels whose mean is large beside their standard
# deviation, which is what these norms are there for. Nothing overflows, so the model trains, with noise. BatchNorm
# with float32 weights is right. Use GroupNorm(channels, channels), or keep the norm in float32.
# Guess before the run: the error is that of rounding the output, 0.008 in bfloat16, as for layer_norm: mean and
# variance are float32 inside of the kernel.
# Output seen on 2026-11-28: bfloat16: InstanceNorm 0.379, BatchNorm 0.216, GroupNorm 0.002; float16: 0.048, 0.028, 0.0;
# BatchNorm with float32 weights 0.001 in bfloat16
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch
from torch import nn

torch.manual_seed(0)
numbers = torch.randn(256, 8, 32) + 100.3
found = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    x = numbers.to(dtype)
    for name, norm, over in (
        ("InstanceNorm", nn.InstanceNorm1d(8).to(dtype), (2,)),
        ("BatchNorm", nn.BatchNorm1d(8).to(dtype), (0, 2)),
        ("BatchNorm, float32 weights", nn.BatchNorm1d(8), (0, 2)),
        ("GroupNorm", nn.GroupNorm(8, 8).to(dtype), (2,)),
    ):
        found[dtype, name] = round(norm(x).double().mean(over).abs().max().item(), 3)
        print(dtype, name, found[dtype, name])
low = torch.bfloat16
right = max(found[low, "GroupNorm"], found[low, "BatchNorm, float32 weights"], found[torch.float32, "InstanceNorm"])
wrong = min(found[low, "InstanceNorm"], found[low, "BatchNorm"], found[torch.float16, "InstanceNorm"])
sys.exit(not (right < 0.01 and wrong > 0.03))
PY
