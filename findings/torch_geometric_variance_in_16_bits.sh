#!/usr/bin/env bash
# Packages: torch_geometric==2.8.1, torch==2.13.0, numpy
# What happens: VarAggregation is the mean of squares minus the square of the mean, in the dtype of its input. In
# bfloat16 the variance of 50 numbers around 300 with a standard deviation of 3 is -512; StdAggregation of numbers
# around 10 with 0.1 is 0, and in float16 both are inf for 5,000 numbers.
# Why it hurts: PNA and other networks on graphs use both. A negative variance goes through the network like any
# number: no nan, no inf, and a sign that float32 never has. StdAggregation clamps it, so that its gradient is 0.
# Guess before the run: 9, 1 and 0.1 within 5 % in all dtypes: deviations from the mean are squared.
# Output seen on 2026-11-28: variance around 300: float32 10.4, float16 nan, bfloat16 -512.0; deviation around 10:
# float32 0.099, float16 inf, bfloat16 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch_geometric==2.8.1 torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch
from torch_geometric.nn.aggr import StdAggregation, VarAggregation

torch.manual_seed(0)
few, many, found = 3 * torch.randn(50, 1) + 300, 0.1 * torch.randn(5_000, 1) + 10, {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    variance = VarAggregation()(few.to(dtype), torch.zeros(50, dtype=torch.long)).item()
    deviation = StdAggregation()(many.to(dtype), torch.zeros(5_000, dtype=torch.long)).item()
    found[dtype] = variance, deviation
    print(dtype, "variance", variance, "deviation", deviation)
wide, half, brain = (found[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16))
right = 5 < wide[0] < 15 and 0.09 < wide[1] < 0.12
sys.exit(not (right and brain[0] < 0 and brain[1] == 0 and half[1] == float("inf")))
PY
