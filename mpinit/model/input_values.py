"""Warnings about inputs whose values a cast to 16 bits damages.

A model adapts to inputs that are rounded. It does not adapt to inputs that are clamped to the dtype's largest number,
that become 0, or whose whole part changes. Timesteps, positions and coordinates do that: 998.39 is 1,000 in bfloat16.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from ..basics.dtypes import cast_within_range, dtype_name, is_lower_precision
from ..basics.logs import warn_user
from ..basics.running import is_eager
from ..basics.trees import tensors_in
from ..config.plan import KeepInputPredicate
from .precision_loss import COUNTED_BY_FLOAT32

# How many numbers of a tensor are read at most.
_MOST_READ: Final = 1 << 20
# A minimum of this or less is the fill value of an additive mask.
_MASKED: Final = -1e4
# A rounding error of this size or more changes whole numbers.
_WHOLE: Final = 0.75


def warn_of_inputs(
    named: Sequence[tuple[str, Any]], keep: Sequence[KeepInputPredicate], dtype: torch.dtype, method: str
) -> None:
    """Warn of arguments that are spoilt by their cast to ``dtype``; those that ``keep`` accepts are not cast."""
    if not is_lower_precision(dtype) or not is_eager():
        return
    for name, value in named:
        if any(test(name, value) for test in keep):
            continue
        reason = next(filter(None, (loss_of_input(tensor, dtype) for tensor in tensors_in(value))), None)
        if reason is None:
            continue
        alone = isinstance(value, torch.Tensor)
        way = "Pass" if alone else "Make that tensor an argument by itself, and pass its name in"
        entry = f"keep_inputs=[{name!r}]" if alone else "keep_inputs"
        warn_user(
            f"the cast of the input {name!r} of {method} to {dtype_name(dtype)} loses values for good: "
            f"{'it' if alone else 'a tensor in it'} {reason}. {way} {entry}, with the entries that you have: it stays "
            "float32, and forward has to cast what it computes from it to the dtype of the other inputs"
        )


def loss_of_input(tensor: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Describe what a cast spoils in an input; None if it only rounds. Of a large tensor only a part is read."""
    if not tensor.is_floating_point() or tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if torch.finfo(tensor.dtype).bits < 32:
        return None
    # A subclass may define slices of its own: MONAI's MetaTensor slices the metadata of a batch, too, and raises.
    with torch._C.DisableTorchFunctionSubclass():
        values = tensor.detach().flatten()[:_MOST_READ]
        values = values[values.isfinite()].cpu()
    if values.numel() == 0:
        return None
    least = values.min()
    if least <= _MASKED:
        values = values[values > least]
    if values.numel() == 0:
        return None
    limits, name = torch.finfo(dtype), dtype_name(dtype)
    size = values.abs()
    largest = float(size.max())
    if largest > limits.max:
        return f"has numbers up to {largest:.6g}, and {name} none beyond {limits.max:.6g}"
    rounded = cast_within_range(values, dtype)
    present, vanished = size > 0, (rounded == 0) & (size > 0)
    if 2 * int(vanished.sum()) > int(present.sum()):
        return f"has numbers of about {float(size[vanished].max()):.3g}, which become 0 in {name}"
    error = float((rounded.to(values.dtype) - values).abs().max())
    if error < _WHOLE or largest > COUNTED_BY_FLOAT32:
        return None
    exact = int(2 / limits.eps)
    return f"has numbers up to {largest:.6g}, and {name} has every whole one only up to {exact:,}"
