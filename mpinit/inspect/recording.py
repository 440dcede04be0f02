"""Every operation of a run, counted by module, dtypes and reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn

from ..basics.dtypes import dtype_name
from ..torch_internals.callers import caller_of_operation
from .numbers import tensors_in
from .precision_report import Row
from .reasons import Operation, Reasons
from .trace import BACKWARD, ModelTrace

# No module's: the loss, most of all.
_NO_MODULE: Final = "(loss)"
_PACKAGE: Final = str(Path(__file__).parents[1]).replace("\\", "/")
_WATCHERS: Final = (f"{_PACKAGE}/inspect/", f"{_PACKAGE}/torch_internals/operations.py")


@final
class Recording:
    """Counts operations, by the module of ``model`` whose forward they belong to.

    Args:
        model: whose modules are told apart.
        reasons: says why an operation runs in the dtype that it does.

    Attributes:
        trace: to be entered around the run.
    """

    def __init__(self, model: nn.Module, reasons: Reasons) -> None:
        self.trace = ModelTrace(model, self.operation, self._module_begins, self._module_ends)
        self._types = {name: type(module).__name__ for name, module in model.named_modules()}
        self._reasons = reasons
        # Count, casts and bytes cast of every row.
        self._rows: dict[Row, list[int]] = {}

    def rows(self) -> tuple[Row, ...]:
        """What was counted, in the order in which it was first met."""
        return tuple(
            dataclasses.replace(row, count=count, casts=casts, cast_bytes=cast_bytes)
            for row, (count, casts, cast_bytes) in self._rows.items()
        )

    def _module_begins(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._reasons.enter(module)

    def _module_ends(self, name: str, output: Any) -> None:
        self._reasons.leave()

    def operation(
        self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run it and count it."""
        inputs = _floating(tensors_in((args, kwargs)))
        result = run()
        outputs = list(tensors_in(result))
        place = self.trace.place()
        seen = Operation(
            name=str(operation.overloadpacket).rpartition(".")[2],
            inputs=inputs,
            outputs=_floating(outputs),
            cast=_cast_of(operation, args, outputs),
            caller=caller_of_operation(_WATCHERS),
        )
        is_backward = place.phase == BACKWARD
        reason = self._reasons.of_backward(seen, place.node) if is_backward else self._reasons.of_forward(seen)
        module = _NO_MODULE if place.module is None else place.module
        row = Row(module, self._types.get(module, ""), place.phase, seen.name, inputs, seen.outputs, *reason)
        counts = self._rows.setdefault(row, [0, 0, 0])
        counts[0] += 1
        if seen.cast is not None:
            counts[1] += 1
            counts[2] += sum(tensor.numel() * tensor.element_size() for tensor in outputs)
        return result


def _floating(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(dtype_name(tensor.dtype) for tensor in tensors if tensor.is_floating_point()))


def _cast_of(operation: Any, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> tuple[str, str] | None:
    """From which floating dtype to which an operation casts; None where it is no cast."""
    if operation is torch.ops.aten._to_copy.default and args and outputs:
        source, target = args[0], outputs[0]
    elif operation is torch.ops.aten.copy_.default and len(args) > 1:
        target, source = args[0], args[1]
    else:
        return None
    if source.dtype == target.dtype or not (source.is_floating_point() and target.is_floating_point()):
        return None
    return dtype_name(source.dtype), dtype_name(target.dtype)
