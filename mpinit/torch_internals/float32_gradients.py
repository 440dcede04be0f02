"""A 16-bit cast of a float32 parameter whose gradients autograd adds up in float32.

``parameter.to(torch.bfloat16)`` gives float32 gradients too, but those of a weight that is used several times in a
graph (in each step of an RNN, in two tied layers) are added up in 16 bit before they are widened. ``grad_dtype`` would
say otherwise, but can be set on leaves alone. What autograd brings gradients into before it adds them is the type that
a tensor had when it was made: so the cast is made as a float32 tensor, of the parameter's own memory, and then given
16-bit data.

No upstream report was found. In torch 2.11 to 2.13; it can go when ``grad_dtype`` can be set on the result of ``to``.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_TENSOR_DATA: Final[Any] = torch.Tensor.data
_TENSOR_DETACH: Final[Any] = torch.Tensor.detach
_UNSAFE_VIEW: Final[Any] = torch.ops.aten._unsafe_view.default


def cast_with_float32_gradients(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``parameter.to(dtype)``, with gradients that are added up in the parameter's type.

    Args:
        parameter: a leaf, dense and in this process as a whole.
        dtype: a 16-bit type.

    Returns:
        A new tensor in memory of its own; with a graph where the parameter takes gradients and they are enabled.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([256.0]))
        >>> cast = cast_with_float32_gradients(weight, torch.bfloat16)
        >>> sum([cast * 256, cast]).backward()
        >>> weight.grad, cast.dtype
        (tensor([257.]), torch.bfloat16)
    """
    values: torch.Tensor = _TENSOR_DETACH(parameter).to(dtype)
    if not parameter.requires_grad:
        return values
    # A view that autograd takes for none: one that it knew of would share the parameter's version.
    cast: torch.Tensor = _UNSAFE_VIEW(parameter, parameter.shape)
    _TENSOR_DATA.__set__(cast, values)
    return cast
