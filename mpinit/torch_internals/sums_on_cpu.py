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
    def forward(ctx: Any, norm: Function, x: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(x, weight, bias)
        ctx.norm = norm
        return norm(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        is_differentiated_again = torch.is_grad_enabled()  # by create_graph=True
        with torch.enable_grad():
            if is_differentiated_again:
                wide: list[Any] = [None if tensor is None else tensor.float() for tensor in tensors]
            else:
                wide = [
                    None if tensor is None else tensor.detach().float().requires_grad_(needs)
                    for tensor, needs in zip(tensors, needed, strict=True)
                ]
            output = ctx.norm(*wide)
        inputs = [tensor for tensor, needs in zip(wide, needed, strict=True) if needs]
        found = iter(torch.autograd.grad(output, inputs, gradient.float(), create_graph=is_differentiated_again))
        return None, *[
            next(found).to(tensor.dtype) if needs else None for tensor, needs in zip(tensors, needed, strict=True)
        ]


def layer_norm(original: Function) -> Function:
    """Wrap a layer norm."""

    def float32_layer_norm(
        input: Any,
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
        # The transforms of torch.func cannot see through a function of autograd that defines no rules for them.
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        is_mixed = any(tensor.dtype is not input.dtype for tensor in tensors)
        if is_transformed or is_mixed or not _adds_in_16_bits(input, *tensors):
            return original(input, normalized_shape, weight, bias, *args, **kwargs)

        def norm(x: Any, scale: Any, shift: Any) -> Any:
            return original(x, normalized_shape, scale, shift, *args, **kwargs)

        return _LayerNorm.apply(norm, input, weight, bias)  # type: ignore[no-untyped-call]

    return float32_layer_norm
