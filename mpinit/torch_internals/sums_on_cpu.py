"""Gradients that torch's kernels for a CPU add in 16 bits, row by row: a sum of ones stops at 256 in bfloat16.

Those of tables (``embedding``, ``embedding_bag``), seen in torch 2.11 to 2.15; no upstream report was found. They are
added in float32 here and rounded once. Forwards have the bits of 16 bits. This file can be deleted when torch adds in
float32.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..basics.dtypes import LOWER_PRECISION

Function = Callable[..., Any]


def in_float32(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with its 16-bit tensors widened to float32."""

    def widened(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in LOWER_PRECISION else value

    return function(*map(widened, args), **{key: widened(value) for key, value in kwargs.items()})


def lookup(sparse: int, original: Function) -> Function:
    """Wrap a look-up in a table. ``sparse``: the place of that argument; sparse gradients are not added there."""

    def float32_lookup(*args: Any, **kwargs: Any) -> Any:
        table = args[0] if args else kwargs["weight"]
        is_sparse = args[sparse] if len(args) > sparse else kwargs.get("sparse", False)
        is_narrow = table.device.type == "cpu" and table.dtype in LOWER_PRECISION
        # Files of torch.export and torch.jit.trace have the plain functions: nothing is trained with them.
        is_written = torch.compiler.is_exporting() or torch._C._is_tracing()
        if is_sparse or is_written or not (is_narrow and torch.is_grad_enabled() and table.requires_grad):
            return original(*args, **kwargs)
        found = in_float32(original, args, kwargs)
        if isinstance(found, tuple):  # of embedding_bag: beside the result there are indices
            return (found[0].to(table.dtype), *found[1:])
        return found.to(table.dtype)

    return float32_lookup
