"""SGD's fused kernel, which steps 16-bit parameters on a CPU wrongly.

It changes only the last elements of a parameter, those beyond a multiple of 16 (with AVX-512). In torch 2.11 to 2.13,
right in 2.15; no upstream report was found. This file can be deleted when no version before 2.15 is supported.
"""

import torch
from torch.optim import Optimizer


def steps_16_bit_wrongly(optimizer: Optimizer) -> bool:
    """Return whether an optimizer would step parameters by this kernel, wrongly if they are 16-bit."""
    if not isinstance(optimizer, torch.optim.SGD) or torch.__version__ >= "2.15":
        return False
    fused = [p for group in optimizer.param_groups if group["fused"] for p in group["params"]]
    return any(p.device.type == "cpu" for p in fused)
