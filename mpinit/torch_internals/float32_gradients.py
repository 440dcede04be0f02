"""16-bit casts of many float32 parameters in one operation, and the cast of their gradients in another.

Where a cast is used several times in a graph, as in an RNN cell or in tied layers, autograd adds the gradients up in 16
bits. ``grad_dtype`` would prevent that, but can be set on leaves only. Autograd adds in the dtype that a function's
output had when it was recorded. So for float32 sums the output is recorded as a float32 tensor, and its data is then
replaced by 16-bit data. Each gradient is then cast by itself.

No upstream report was found. In torch 2.11 to 2.15; float32 sums can be made without this when ``grad_dtype`` can be
set on the result of ``to``.
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


class _Narrowed(torch.autograd.Function):
    """16-bit copies of parameters; the gradients are cast together when all have arrived."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_copies([TENSOR_DATA.__get__(parameter) for parameter in parameters], dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        present = [gradient for gradient in gradients if gradient is not None]
        if torch.is_grad_enabled() or any(type(each) is not torch.Tensor or each.is_sparse for each in present):
            wide = [gradient.float() for gradient in present]  # create_graph=True, or a sparse gradient
        else:
            wide = _copies(present, torch.float32)
        found = iter(wide)
        return None, *(None if gradient is None else next(found) for gradient in gradients)


def _copies(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(made, tensors)
    return made


def cast_together(parameters: Sequence[nn.Parameter], dtype: torch.dtype, sums: torch.dtype | None) -> list[Any]:
    """Cast parameters to 16 bits; their gradients are float32.

    Args:
        parameters: float32 parameters on any devices.
        dtype: the 16-bit dtype.
        sums: torch.float32: the gradients of several uses in one graph add up in float32; None: in 16 bits.
    """
    found: list[torch.Tensor] = []
    for own in _nodes(parameters):
        if sums is None:
            found += _Narrowed.apply(dtype, *own)  # type: ignore[no-untyped-call]
            continue
        narrow = _copies(list(map(TENSOR_DATA.__get__, own)), dtype)
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
