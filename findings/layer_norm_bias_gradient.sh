#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: on a CPU the gradient of LayerNorm's bias is added over rows in the input's dtype: with 5,000 rows of
# gradient 1 it is 256 in bfloat16 and 2,048 in float16, for each thread, also where the bias itself is float32. The
# biases of Linear and BatchNorm, and RMSNorm's weight, sum the same gradients right.
# Why it hurts: a 16-bit model trains its LayerNorm biases with a fraction of their gradients as soon as a batch has
# more than a few hundred tokens, and only these; float32 parameters of the norm do not help. Only a float32 input
# does, as autocast makes it.
# Guess before the run: all bias gradients are sums in float32 that are rounded once: 4,992 in bfloat16 and 5,000 in
# float16; with float32 parameters 5,000.
# Output seen on 2026-11-28: bfloat16: layer_norm 256.0, linear 4992.0; float16: layer_norm 2048.0, linear 5000.0;
# bfloat16 input and float32 parameters: layer_norm 256.0; float32 input: 5000.0 (one thread)
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
rows = 5_000


def gradient(function, dtype, of=None):
    bias = torch.zeros(4, dtype=of or dtype, requires_grad=True)
    function(torch.randn(rows, 4).to(dtype), bias).float().sum().backward()
    return bias.grad[0].item()


def norm(x, bias):
    return F.layer_norm(x, (4,), torch.ones_like(bias), bias)


def linear(x, bias):
    return F.linear(x, torch.zeros(4, 4, dtype=x.dtype), bias)


right = True
for dtype, stop in ((torch.bfloat16, 256), (torch.float16, 2_048)):
    found = gradient(norm, dtype), gradient(linear, dtype)
    print(dtype, "layer_norm", found[0], "linear", found[1])
    right &= found[0] == stop and found[1] > 4_900
mixed, wide = gradient(norm, torch.bfloat16, torch.float32), gradient(norm, torch.float32)
print("bfloat16 input, float32 parameters:", mixed, "float32 input:", wide)
sys.exit(not (right and mixed == 256 and wide == rows))
PY
