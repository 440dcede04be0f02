"""Casting parameters and buffers in place, and taking it back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..basics.patching import Undo
from ..distributed.sharding import rebuild_groups, set_data


def cast_tensors(targets: dict[torch.Tensor, torch.dtype]) -> Undo:
    """Cast parameters and buffers in place, one at a time, gradients with them.

    Whoever wants the float32 bits later holds on to the old storage: masters do. For everything else the undo casts
    back what the 16-bit values are then.

    Args:
        targets: tensor -> dtype.

    Returns:
        The undo.
    """
    before = {tensor: tensor.dtype for tensor in targets}

    def undo() -> None:
        for tensor, dtype in before.items():
            _cast_in_place(tensor, dtype)

    try:
        for tensor, dtype in targets.items():
            _cast_in_place(tensor, dtype)
    except BaseException:
        undo()
        raise
    return undo


def _cast_in_place(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype == dtype:
        return
    gradient, tensor.grad = tensor.grad, None
    set_data(tensor, tensor.detach().to(dtype))
    if gradient is not None:
        tensor.grad = gradient.to(dtype)


def rebuild_flat_weights(models: Sequence[nn.Module]) -> None:
    """Let RNNs, and FSDP, gather their weights anew after a cast."""
    rebuild_groups(models)
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
