#!/usr/bin/env bash
# Packages: monai==1.6.1, torch==2.13.0, numpy
# What happens: monai's DiceLoss and TverskyLoss of a float16 volume of 96 x 96 x 96 are exactly 1, with gradients of
# 0, where 0.878 is right; GeneralizedDiceLoss is nan. They sum probabilities over the volume in the input's dtype, and
# the sum is above 65,504. FocalLoss of the same package computes in float32. bfloat16 is right.
# Why it hurts: a Dice loss near 1 is what one sees at the beginning of a training, so a loss that stays there looks
# like a hard task or a bad rate. DiceCELoss and DiceFocalLoss go down, by their other half alone. Small test volumes
# (40 x 40 x 40) are right. Call .float() on what the loss gets; at O2 and O5 the outputs of a model are float32.
# Guess before the run: within 1 % of float32 in both 16-bit dtypes: a package for volumes sums in float32.
# Output seen on 2026-11-28: DiceLoss float32 (0.878, 0.1352), bfloat16 (0.879, 0.1347), float16 (1.0, 0.0); of 40 x 40
# x 40 in float16 (0.879, 0.1342); GeneralizedDiceLoss float16 (nan, nan)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check monai==1.6.1 torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch
from monai.losses import DiceLoss, GeneralizedDiceLoss


def loss_of(kind, dtype, edge):
    torch.manual_seed(0)
    logits = (torch.randn(1, 1, edge, edge, edge) - 2).to(dtype).requires_grad_()
    loss = kind(sigmoid=True)(logits, (torch.rand(1, 1, edge, edge, edge) < 0.1).to(dtype))
    loss.backward()
    return round(loss.item(), 3), round(logits.grad.double().abs().sum().item(), 4)


wide, low, half = (loss_of(DiceLoss, dtype, 96) for dtype in (torch.float32, torch.bfloat16, torch.float16))
small, general = loss_of(DiceLoss, torch.float16, 40), loss_of(GeneralizedDiceLoss, torch.float16, 96)
print("float32", wide, "bfloat16", low, "float16", half, "of 40 x 40 x 40", small, "GeneralizedDiceLoss", general)
right = abs(wide[0] - 0.878) < 0.01 and abs(low[0] - wide[0]) < 0.01 and abs(small[0] - wide[0]) < 0.02 and small[1] > 0
sys.exit(not (right and half == (1.0, 0.0) and general[0] != general[0]))
PY
