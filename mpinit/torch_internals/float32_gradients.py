"""16-bit casts of float32 parameters whose gradients autograd adds up in float32.

The gradient of ``parameter.to(torch.bfloat16)`` is float32. But where the cast is used several times in a graph, as in
an RNN cell or in tied layers, autograd adds the gradients up in 16 bits and widens the sum. ``grad_dtype`` would
prevent that, but can be set on leaves only. Autograd adds in the dtype that a function's output had when it was
recorded. So the output is recorded as a float32 tensor, and its data is then replaced by 16-bit data.

No upstream report was found. In torch 2.11 to 2.15; this file can be deleted when ``grad_dtype`` can be set on the
result of ``to``.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from .parameter_data import TENSOR_DATA

# One node of the graph has casts of at most so many numbers, because it passes gradients on when it has all of them.
_PER_NODE: Final = 1 << 22


class _Recorded(torch.autograd.Function):
    """An identity function from parameters to new tensors that share their memory.

    One for many parameters, because each call of a Python function in the graph takes as long as a small layer.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a backward pass may reach some of the casts only
        return tuple(map(TENSOR_DATA.__get__, parameters))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


def cast_with_float32_gradients(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor]:
    """Cast parameters to ``dtype``; the gradients of each add up in the parameter's dtype."""
    found: list[torch.Tensor] = []
    for own in _nodes(parameters):
        values = list(map(TENSOR_DATA.__get__, own))
        narrow = [torch.empty_like(value, dtype=dtype) for value in values]
        torch._foreach_copy_(narrow, values)
        casts: tuple[torch.Tensor, ...] = _Recorded.apply(*own)  # type: ignore[no-untyped-call]
        for cast, value in zip(casts, narrow, strict=True):
            TENSOR_DATA.__set__(cast, value)
        found += casts
    return found


def _nodes(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split parameters, in order, into the groups that share a node; frozen ones share none with others."""
    group: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        is_full = size + parameter.numel() > _PER_NODE
        if group and (is_full or group[0].requires_grad != parameter.requires_grad):
            yield group
            group, size = [], 0
        group.append(parameter)
        size += parameter.numel()
    if group:
        yield group
