"""16-bit casts of float32 parameters, made in one call, whose gradients autograd accumulates in float32.

The gradients of ``parameter.to(torch.bfloat16)`` are float32 too. But if the cast is used several times in a graph, as
in an RNN or in tied layers, autograd accumulates its gradients in 16 bits and widens the sum. ``grad_dtype`` would
prevent that, but can be set on leaves only. Autograd accumulates in the dtype that a function's output had when it was
recorded. So the outputs are recorded as float32 tensors, and their data is then replaced by 16-bit data.

No upstream report was found. In torch 2.11 to 2.13; this file can be deleted when ``grad_dtype`` can be set on the
result of ``to``.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from .parameter_data import TENSOR_DATA

# The float32 elements in a bucket of DistributedDataParallel, which is 25 MiB.
_NUMBERS_AT_A_TIME: Final = 25 * 2**20 // 4


class _Recorded(torch.autograd.Function):
    """An identity function from parameters to new tensors that share their memory."""

    @staticmethod
    def forward(ctx: Any, new: list[torch.Tensor], *parameters: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(new)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, *gradients


def casts_with_float32_gradients(parameters: list[nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Cast parameters to ``dtype``; their gradients accumulate in the parameters' dtype.

    One kernel casts all. One node of the graph has up to 25 MiB of parameters, and passes on their gradients together,
    when the last is computed. DistributedDataParallel has buckets of the same size, so it starts to reduce a bucket
    later, at most by the time that the backward pass needs for one. In models below 25 MiB the reduction does not
    overlap with the backward pass.

    Returns:
        The casts; None for an instance of another class, a sparse parameter, an inference tensor, or no leaf.
    """
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
        cast.__class__ = nn.Parameter  # code in a forward may check isinstance(weight, nn.Parameter)
    return casts


def _groups(parameters: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield the indices of parameters that require gradients, one list for each node of the graph."""
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
