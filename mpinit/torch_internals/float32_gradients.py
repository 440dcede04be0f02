"""16-bit casts of float32 parameters, made in one call, whose gradients autograd adds up in float32.

With ``parameter.to(torch.bfloat16)`` gradients are float32 too, but those of a weight that is used several times in a
graph (in each step of an RNN, in two tied layers) are added up in 16 bit before they are widened. ``grad_dtype`` would
prevent it, but can be set on leaves alone. Autograd adds gradients in the dtype that a function's output had when it
was recorded: so outputs are recorded as float32 tensors, and their data is set to 16-bit data then.

No upstream report was found. In torch 2.11 to 2.13; it can go when ``grad_dtype`` can be set on the result of ``to``.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from .one_pass import native
from .parameter_data import TENSOR_DATA

# As many float32 numbers as a bucket of DistributedDataParallel holds: 25 MiB.
_NUMBERS_AT_A_TIME: Final = 25 * 2**20 // 4


class _Recorded(torch.autograd.Function):
    """A function from parameters to new tensors in their memory; it passes gradients on."""

    @staticmethod
    def forward(ctx: Any, new: list[torch.Tensor], *parameters: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(new)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, *gradients


def casts_with_float32_gradients(parameters: list[nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Return each ``parameter.to(dtype)``, with gradients that are added up in the parameters' dtype.

    All are cast by one kernel, and one node of the graph stands for 25 MiB of parameters: their gradients arrive
    together, when the last of them is there. DistributedDataParallel, whose buckets are as large, so begins to average
    a bucket later by at most the time in which the backward pass computes one, and models below that size do not
    overlap the two. None where a parameter is of another class, computed, sparse or of inference mode.
    """
    if (code := native()) is not None:
        made: list[torch.Tensor | None] = code.casts(parameters, nn.Parameter, dtype, _NUMBERS_AT_A_TIME)
        return made
    is_ordinary = list(map(_is_ordinary, parameters))
    casts = iter(_casts(list(itertools.compress(parameters, is_ordinary)), dtype))
    return [next(casts) if is_one else None for is_one in is_ordinary]


def _is_ordinary(parameter: torch.Tensor) -> bool:
    is_dense = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    return is_dense and parameter.is_leaf and not parameter.is_inference()


def _casts(parameters: list[nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor]:
    plain = list(map(TENSOR_DATA.__get__, parameters))
    casts = [torch.empty_like(values, dtype=dtype) for values in plain]
    if casts:
        torch._foreach_copy_(casts, plain)
    if torch.is_grad_enabled():
        for indices in _groups(parameters):
            new = [plain[index] for index in indices]
            recorded = _Recorded.apply(new, *[parameters[index] for index in indices])  # type: ignore[no-untyped-call]
            for index, output in zip(indices, recorded, strict=True):
                TENSOR_DATA.__set__(output, casts[index])
                casts[index] = output
    for cast in casts:
        cast.__class__ = nn.Parameter  # code that a forward runs may ask for one
    return casts


def _groups(parameters: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield the indices of parameters that require gradients, as many at a time as one node has."""
    group: list[int] = []
    numbers = 0
    for index, parameter in enumerate(parameters):
        if parameter.requires_grad:
            if group and numbers + parameter.numel() > _NUMBERS_AT_A_TIME:
                yield group
                group, numbers = [], 0
            group.append(index)
            numbers += parameter.numel()
    if group:
        yield group
