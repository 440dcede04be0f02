#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: F.local_response_norm squares its input in the input's dtype. In float16 a value of 300, whose result
# is 74.6, becomes 0; F.lp_pool1d of the same values is inf. Values of 200 are right.
# Why it hurts: activations that are large are not limited but deleted: exactly the strongest channels become 0 in the
# forward pass, without an inf or nan that a loss scale or a check would see, and their gradients are 0 too.
# Guess before the run: the squares are averaged in float32, as in the other norms: 74.6. For lp_pool1d: 600, or inf.
# Output seen on 2026-11-28: local_response_norm float32 74.56, float16 0.0, its gradient 0.0; of 200: 79.9; lp_pool1d
# inf
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch
from torch.nn import functional as F

wide = F.local_response_norm(torch.full((1, 8, 4), 300.0), 5)[0, 0, 0].item()
large = torch.full((1, 8, 4), 300.0, dtype=torch.float16, requires_grad=True)
found = F.local_response_norm(large, 5)
found.sum().backward()
smaller = F.local_response_norm(torch.full((1, 8, 4), 200.0, dtype=torch.float16), 5)[0, 0, 0].item()
pooled = F.lp_pool1d(large, 2, 4)[0, 0, 0].item()
first, gradient = found[0, 0, 0].item(), large.grad[0, 0, 0].item()
print("float32", wide, "float16", first, "gradient", gradient, "of 200:", smaller, "lp_pool1d", pooled)
sys.exit(not (74 < wide < 75 and first == 0 and smaller > 50 and pooled == float("inf")))
PY
