#!/usr/bin/env bash
# Packages: torch==2.13.0, numpy
# What happens: with 65,520 classes or more and logits that are close to each other, as of a new model,
# F.cross_entropy, log_softmax and logsumexp of float16 are inf on a CPU: the sum of exponentials, one per class, is
# rounded to float16 before its logarithm is taken. softmax of the same numbers is right.
# Why it hurts: vocabularies of today have 100,000 tokens and more. Before its first step a model's logits are nearly
# equal, so the loss is inf exactly there, and goes away once the logits differ: it looks like a loss scale or a
# learning rate that is too large. Nothing is large in the input or in the result (11.5). logsumexp is also what the
# z-loss of routers and heads squares.
# Guess before the run: logarithms are taken in float32, as softmax does: 11.5.
# Output seen on 2026-11-28: float32 11.51, float16 inf; of 60,000 classes 11.0; of normal logits with a standard
# deviation of 0.02 inf; log_softmax -inf, logsumexp inf, softmax 1.0e-05
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import sys
import torch
from torch.nn import functional as F

torch.manual_seed(0)
targets = torch.zeros(4, dtype=torch.long)
logits = torch.zeros(4, 100_000, dtype=torch.float16)
wide, loss = F.cross_entropy(logits.float(), targets).item(), F.cross_entropy(logits, targets).item()
fewer = F.cross_entropy(logits[:, :60_000], targets).item()
others = [each.flatten()[0].item() for each in (logits.log_softmax(1), logits.logsumexp(1), logits.softmax(1))]
small = F.cross_entropy(0.02 * torch.randn(4, 100_000).half(), targets).item()
print("float32", wide, "float16", loss, "60,000 classes", fewer, "logits of a new model", small)
print("log_softmax, logsumexp, softmax:", others)
infinite = float("inf")
right = 11 < wide < 12 and 10 < fewer < 12 and others[2] > 0
sys.exit(not (right and loss == small == infinite and others[:2] == [-infinite, infinite]))
PY
