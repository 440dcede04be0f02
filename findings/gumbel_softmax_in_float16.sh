#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: F.gumbel_softmax in float16 returns rows of nan now and then. Its noise is -log of an exponential draw;
# in float16 a small draw is rounded to 0, its noise is inf, and softmax makes nan of the row. In 20 million draws with
# a fixed seed it happens at least once; in float32 and bfloat16 not at all.
# Why it hurts: a discrete latent or a router that samples like this gets a nan about once in some ten million draws: a
# run dies after hours, at a step that cannot be repeated without its seed.
# Guess before the run: the draw is made in float32 or kept above 0, so that the result is finite in every dtype.
# Output seen on 2026-11-28: float32 0; bfloat16 0; float16 1 of 20 calls with a nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch
from torch.nn import functional as F

found = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    torch.manual_seed(0)
    logits = torch.zeros(1_000, 1_000, dtype=dtype)
    found[dtype] = sum(bool(F.gumbel_softmax(logits).isnan().any()) for _ in range(20))
    print(dtype, found[dtype], "of 20 calls with a nan")
sys.exit(not (found[torch.float16] > 0 and found[torch.float32] == found[torch.bfloat16] == 0))
PY
