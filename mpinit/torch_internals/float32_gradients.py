"""A 16-bit cast of a float32 parameter whose gradients autograd adds up in float32.

The gradient of ``parameter.to(torch.bfloat16)`` is float32. But where the cast is used several times in a graph, as in
an RNN cell or in tied layers, autograd adds the gradients up in 16 bits and widens the sum. ``grad_dtype`` would
prevent that, but can be set on leaves only. Autograd adds in the dtype that a function's output had when it was
recorded. So the output is recorded as a float32 tensor, and its data is then replaced by 16-bit data.

No upstream report was found. In torch 2.11 to 2.15; this file can be deleted when ``grad_dtype`` can be set on the
result of ``to``.
"""

from typing import Any

import torch
from torch import nn

from .parameter_data import TENSOR_DATA


class _Recorded(torch.autograd.Function):
    """An identity function from a parameter to a new tensor that shares its memory."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        shared: torch.Tensor = TENSOR_DATA.__get__(parameter)
        return shared

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def cast_with_float32_gradients(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """Cast a parameter to ``dtype``; its gradients add up in the parameter's dtype."""
    cast: torch.Tensor = _Recorded.apply(parameter)  # type: ignore[no-untyped-call]
    TENSOR_DATA.__set__(cast, TENSOR_DATA.__get__(parameter).to(dtype))
    return cast
