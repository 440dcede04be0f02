#!/usr/bin/env bash
# Packages: trl==1.16.0, transformers==5.24.0, torch==2.13.0, numpy
# What happens: trl's selective_log_softmax has a branch of its own for 16-bit logits, for precision, and returns the
# logits' dtype: in bfloat16 the log-probability of a token is off by up to 0.07, and the sum over 500 tokens by up to
# 13, which is rounded to a multiple of 32.
# Why it hurts: DPO, GRPO and RLOO take differences and exponentials of these numbers. A ratio between two policies
# moves in steps of 6 % for a token of -11, where clipping begins at 20 %, and differences between sequences are less
# than the rounding. Logits are bfloat16 where a model is loaded in bfloat16 and trained with bf16=False; with
# bf16=True accelerate returns float32. At O5 the outputs of a model are float32.
# Guess before the run: the result is float32, or sums over 500 tokens are right within 0.5.
# Output seen on 2026-11-28: torch.bfloat16; sums [-5536.0, -5536.0, -5792.0, -5504.0], float32 of the same logits
# [-5530.3, -5545.0, -5786.0, -5516.7]; largest error of a token 0.073
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check trl==1.16.0 transformers==5.24.0 \
    torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import sys
import torch
from trl.trainer.utils import selective_log_softmax

torch.manual_seed(0)
logits = (torch.randn(4, 500, 1_000) * 3).bfloat16()
tokens = torch.randint(0, 1_000, (4, 500))
found, right = selective_log_softmax(logits, tokens), selective_log_softmax(logits.float(), tokens)
error, error_of_sum = (found.float() - right).abs().max().item(), (found.sum(1).float() - right.sum(1)).abs().max().item()
print(found.dtype, found.sum(1).tolist(), [round(number, 1) for number in right.sum(1).tolist()], round(error, 3))
sys.exit(not (found.dtype is torch.bfloat16 and error > 0.03 and error_of_sum > 4 and right.dtype is torch.float32))
PY
