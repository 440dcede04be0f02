#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: torch.logit(x, eps=1e-6) of 1 is inf in bfloat16 and in float16: the limit 1 - eps is 1 in these
# dtypes. At the other end, in float16, eps is rounded to a subnormal number.
# Why it hurts: eps is there so that no inf comes out. Normalising flows and losses on probabilities that use it get
# inf, and then nan, the first time that a 16-bit sigmoid saturates, which in bfloat16 it does from 6.3 on.
# Guess before the run: the clamp is computed in float32, or eps is at least the dtype's resolution: a finite number.
# Output seen on 2026-11-28: float32 13.8023; bfloat16 inf; float16 inf; sigmoid(6.3) in bfloat16 is 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch

found = {dtype: torch.logit(torch.ones((), dtype=dtype), eps=1e-6).item() for dtype in
         (torch.float32, torch.bfloat16, torch.float16)}
saturated = torch.tensor(6.3, dtype=torch.bfloat16).sigmoid().item()
print(found, "sigmoid(6.3) in bfloat16", saturated)
infinite = float("inf")
right = 13 < found[torch.float32] < 14 and found[torch.bfloat16] == found[torch.float16] == infinite
sys.exit(not (right and saturated == 1.0))
PY
