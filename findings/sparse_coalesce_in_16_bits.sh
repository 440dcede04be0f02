#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: on a CPU, coalesce() of a sparse tensor adds duplicate entries in the tensor's dtype: 5,000 ones become
# 256 in bfloat16 and 2,048 in float16. torch.sparse.mm stops at the same numbers. torch.sparse.sum and scatter_add_ of
# the same numbers are right.
# Why it hurts: the gradient of nn.Embedding(sparse=True) is such a tensor, and an optimizer for it coalesces: a token
# that a batch has 5,000 times gets a twentieth of its gradient.
# Guess before the run: coalesce adds like scatter_add_, in float32 with one rounding: 4,992 and 5,000.
# Output seen on 2026-11-28: bfloat16 coalesce 256 mm 256 sum 4992 scatter_add 4992; float16 coalesce 2048 mm 2048 sum
# 5000 scatter_add 5000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch

torch.set_num_threads(1)
count, right = 5_000, True
for dtype, stop in ((torch.bfloat16, 256), (torch.float16, 2_048)):
    zeros, ones = torch.zeros(count, dtype=torch.long), torch.ones(count, dtype=dtype)
    coalesced = torch.sparse_coo_tensor(zeros[None], ones, (1,)).coalesce().values().item()
    row = torch.sparse_coo_tensor(torch.stack([zeros, torch.arange(count)]), ones, (1, count))
    product = torch.sparse.mm(row, ones[:, None]).item()
    total = torch.sparse.sum(row).item()
    scattered = torch.zeros(1, dtype=dtype).scatter_add_(0, zeros, ones).item()
    print(dtype, "coalesce", coalesced, "mm", product, "sum", total, "scatter_add", scattered)
    right &= coalesced == product == stop and total > 4_900 and scattered > 4_900
sys.exit(not right)
PY
