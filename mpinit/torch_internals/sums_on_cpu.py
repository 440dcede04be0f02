"""Gradients that torch's kernels for a CPU add in 16 bits, row by row: a sum of ones stops at 256 in bfloat16.

Those of tables (``embedding``, ``embedding_bag``) and of a LayerNorm's weights, seen in torch 2.11 to 2.15; no upstream
report was found. They are added in float32 here and rounded once. Forwards have the bits and the memory of 16 bits.
This file can be deleted when torch adds in float32.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from ..basics.dtypes import LOWER_PRECISION

Function = Callable[..., Any]
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_FORWARD: Final[Any] = torch.ops.aten.native_layer_norm.default
_BACKWARD: Final[Any] = torch.ops.aten.native_layer_norm_backward.default


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in LOWER_PRECISION else value


def _adds_in_16_bits(first: Any, *trained: Any) -> bool:
    """Return whether a gradient of any of these would be added in 16 bits, where ``first`` is a 16-bit tensor."""
    is_plain = type(first) in _PLAIN or torch.compiler.is_compiling()
    is_narrow = is_plain and first.device.type == "cpu" and first.dtype in LOWER_PRECISION
    # Files of torch.export and torch.jit.trace have the plain functions: nothing is trained with them.
    is_written = torch.compiler.is_exporting() or torch._C._is_tracing()
    is_trained = torch.is_grad_enabled() and any(each.requires_grad for each in trained)
    return is_narrow and is_trained and not is_written


def lookup(sparse: int, original: Function) -> Function:
    """Wrap a look-up in a table. ``sparse``: the place of that argument; sparse gradients are not added there."""

    def float32_lookup(*args: Any, **kwargs: Any) -> Any:
        table = args[0] if args else kwargs["weight"]
        is_sparse = args[sparse] if len(args) > sparse else kwargs.get("sparse", False)
        if is_sparse or not _adds_in_16_bits(table, table):
            return original(*args, **kwargs)
        found = original(*map(_widened, args), **{key: _widened(value) for key, value in kwargs.items()})
        if isinstance(found, tuple):  # of embedding_bag: beside the result there are indices
            return (found[0].to(table.dtype), *found[1:])
        return found.to(table.dtype)

    return float32_lookup


class _LayerNorm(torch.autograd.Function):
    """A layer norm of 16-bit tensors, whose gradients are computed in float32 from the same tensors."""

    @staticmethod
    def forward(ctx: Any, norm: Function, shape: Any, eps: float, x: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(x, weight, bias)
        ctx.norm, ctx.shape, ctx.eps = norm, shape, eps
        return norm(x, shape, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        needed = ctx.needs_input_grad[3:]
        tensors = ctx.saved_tensors
        wide: list[Any] = [None if tensor is None else tensor.float() for tensor in tensors]
        x, weight, bias = wide
        if torch.is_grad_enabled():  # create_graph=True: the gradients are differentiated again
            output = ctx.norm(x, ctx.shape, weight, bias, ctx.eps)
            inputs = [tensor for tensor, needs in zip(wide, needed, strict=True) if needs]
            known = iter(torch.autograd.grad(output, inputs, gradient.float(), create_graph=True))
            found: Any = [next(known) if needs else None for needs in needed]
        else:
            # The kernels that autograd would call, without a graph: a third of the time.
            _, mean, rstd = _FORWARD(x, ctx.shape, weight, bias, ctx.eps)
            found = _BACKWARD(gradient.float(), x, ctx.shape, mean, rstd, weight, bias, list(needed))
        narrow = [
            each.to(tensor.dtype) if needs else None for each, tensor, needs in zip(found, tensors, needed, strict=True)
        ]
        return None, None, None, *narrow


def layer_norm(original: Function) -> Function:
    """Wrap ``torch.layer_norm``."""

    def float32_layer_norm(
        input: Any,
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
        cudnn_enable: bool = True,
    ) -> Any:
        tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
        # The transforms of torch.func cannot see through a function of autograd that defines no rules for them.
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        is_mixed = any(tensor.dtype is not input.dtype for tensor in tensors)
        if is_transformed or is_mixed or not _adds_in_16_bits(input, *tensors):
            return original(input, normalized_shape, weight, bias, eps, cudnn_enable)
        shape = list(normalized_shape)
        return _LayerNorm.apply(original, shape, eps, input, weight, bias)  # type: ignore[no-untyped-call]

    return float32_layer_norm
