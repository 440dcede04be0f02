"""Every operation of a run, counted by module, dtypes and reason."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ..basics.dtypes import dtype_name
from ..torch_internals.callers import caller_of_operation
from .reasons import Operation, Reasons
from .restoring import Untouched, tensors_in

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
OUTSIDE: Final = "(loss)"

_LEAF: Final = 2**63  # gradients' last nodes have no number of their own


@dataclass
class Tally:
    """What was counted of operations that agree in everything.

    Attributes:
        count: how often.
        casts: how many of them were casts from one floating type to another.
        cast_bytes: what these wrote.
        elements: how many numbers they returned.
        gradients: floating dtypes that the backward of these operations returned.
    """

    count: int = 0
    casts: int = 0
    cast_bytes: int = 0
    elements: int = 0
    gradients: dict[str, None] = field(default_factory=dict)


# module, phase, operation, floating dtypes of inputs, of outputs, why, where, whether it is flagged
Key = tuple[str, str, str, tuple[str, ...], tuple[str, ...], str, str, bool]


class Recording(TorchDispatchMode):
    """Counts the operations inside the block, by the module of ``model`` whose forward they belong to.

    A backward operation belongs to the module of the forward operation whose gradient it computes: torch numbers both
    alike. Nothing stays installed after the block.

    Args:
        model: whose modules are told apart.
        reasons: who says why an operation runs in the dtype that it does.
        untouched: told of every write before it happens.

    Attributes:
        tallies: what was counted.
    """

    def __init__(self, model: nn.Module, reasons: Reasons, untouched: Untouched) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tallies: dict[Key, Tally] = {}
        self._names = {module: name for name, module in model.named_modules()}
        self._owners = {p: name.rpartition(".")[0] for name, p in model.named_parameters()}
        self._reasons = reasons
        self._untouched = untouched
        self._thread = threading.get_ident()
        self._running: list[str] = []
        self._numbered: dict[int, tuple[str, Tally]] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Recording:
        # Hooks of the process: modules with hooks of their own take other paths, and these are gone after the block.
        self._handles.append(module_hooks.register_module_forward_pre_hook(self._begin))
        try:
            self._handles.append(module_hooks.register_module_forward_hook(self._end, always_call=True))
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._remove_hooks()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove_hooks()
        super().__exit__(exc_type, exc, traceback)  # type: ignore[no-untyped-call]

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if module in self._names and threading.get_ident() == self._thread:
            self._running.append(self._names[module])
            self._reasons.enter(module)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module in self._names and threading.get_ident() == self._thread and self._running:
            self._running.pop()
            self._reasons.leave()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        given = dict(kwargs or {})
        for tensor in written_to(func, args, given):
            self._untouched.before_write(tensor)
        inputs = _floating(tensors_in((args, given)))
        result = func(*args, **given)
        self._count(func, inputs, args, result)
        return result

    def _count(self, func: Any, inputs: tuple[str, ...], args: tuple[Any, ...], result: Any) -> None:
        node = torch._C._current_autograd_node()
        # While a forward is computed again in the backward pass, modules run.
        in_backward = node is not None and not self._running
        outputs = list(tensors_in(result))
        operation = Operation(
            name=str(func.overloadpacket).rpartition(".")[2],
            inputs=inputs,
            outputs=_floating(outputs),
            cast=cast_of(func, args, outputs),
            caller=caller_of_operation(__file__),
        )
        if in_backward:
            module, forward = self._origin(node)
            reason = self._reasons.of_backward(operation, type(node).__name__)
            if forward is not None:
                forward.gradients.update(dict.fromkeys(operation.outputs))
        else:
            module = self._running[-1] if self._running else OUTSIDE
            reason = self._reasons.of_forward(operation)
        phase = BACKWARD if in_backward else FORWARD
        key = (module, phase, operation.name, inputs, operation.outputs, reason.why, reason.where, reason.flagged)
        tally = self.tallies.setdefault(key, Tally())
        tally.count += 1
        tally.elements += sum(tensor.numel() for tensor in outputs)
        if operation.cast is not None:
            tally.casts += 1
            tally.cast_bytes += sum(tensor.numel() * tensor.element_size() for tensor in outputs)
        if not in_backward:
            self._numbered.setdefault(torch._C._autograd._get_sequence_nr() - 1, (module, tally))

    def _origin(self, node: Any) -> tuple[str, Tally | None]:
        """The module and the forward operation that a node of the backward graph belongs to."""
        number = node._sequence_nr()
        if number < _LEAF:
            return self._numbered.get(number, (OUTSIDE, None))
        return self._owners.get(getattr(node, "variable", None), OUTSIDE), None  # type: ignore[arg-type]


def _floating(tensors: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(dtype_name(tensor.dtype) for tensor in tensors if tensor.is_floating_point()))


def cast_of(func: Any, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> tuple[str, str] | None:
    """From which floating dtype to which an operation casts; None where it is no cast."""
    if func is torch.ops.aten._to_copy.default and args and outputs:
        source, target = args[0], outputs[0]
    elif func is torch.ops.aten.copy_.default and len(args) > 1:
        target, source = args[0], args[1]
    else:
        return None
    if source.dtype == target.dtype or not (source.is_floating_point() and target.is_floating_point()):
        return None
    return dtype_name(source.dtype), dtype_name(target.dtype)


@functools.lru_cache(maxsize=4096)
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def written_to(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to, as its schema says.

    Example:
        >>> x = torch.ones(2)
        >>> written_to(torch.ops.aten.add_.Tensor, (x, 1), {})[0] is x
        True
    """
    places = _written(func)
    found = [args[index] if index < len(args) else kwargs.get(name) for index, name in places]
    return list(tensors_in(found))
