"""A trace of a model's run: every operation, with the module that it belongs to."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final, NamedTuple, Self

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
# The module of operations outside of the model, such as those of the loss.
OUTSIDE: Final = None
# AccumulateGrad nodes have no number of their own in the order of the forward; theirs are at least this.
_NO_NUMBER: Final = 2**63

Run = Callable[[], Any]


class Place(NamedTuple):
    """The place in a run where an operation is called.

    Attributes:
        phase: "forward" or "backward".
        module: the dotted name of the module. "" is the model itself; None: outside of it.
        node: the name of the running node of the backward graph; "" in a forward.
    """

    phase: str
    module: str | None
    node: str


class ModelTrace:
    """A context manager that calls functions for the operations and modules of ``model``.

    A backward operation belongs to the module whose forward created its node. Autograd numbers its nodes in order of
    creation (the numbers are not public), so the trace records the first node number of each module's forward.
    ``torch.utils.module_tracker`` has a set of modules in the backward pass, which a module whose inputs need no
    gradient never leaves, and which does not tell parallel branches apart.

    Args:
        model: the model.
        operation: called for each operation. Default None.
        ends: called when a module's forward ends. Default None.
    """

    def __init__(self, model: nn.Module, operation: Any = None, ends: Any = None) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._owners: dict[Any, str] = {p: name.rpartition(".")[0] for name, p in model.named_parameters()}
        self._ends = ends
        self._is_unseen = False
        self._operation = operation
        self._mode: Any = nullcontext() if operation is None else OperationsSeen(self._call_operation)
        self._thread = threading.get_ident()
        self._stack = ExitStack()
        self._running: list[str] = []
        # At each begin and end of a forward: the next node's number, and the module that runs from there on.
        self._numbers: list[int] = []
        self._ran: list[str | None] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # Global hooks: modules with hooks of their own may run other code.
            stack.callback(module_hooks.register_module_forward_pre_hook(self._begin).remove)
            stack.callback(module_hooks.register_module_forward_hook(self._end, always_call=True).remove)
            stack.enter_context(self._mode)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Report no operations inside the block: they are those of the report itself, in a hook."""
        before, self._is_unseen = self._is_unseen, True
        try:
            yield
        finally:
            self._is_unseen = before

    def _call_operation(
        self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        return run() if self._is_unseen else self._operation(operation, args, kwargs, run)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if self._is_ours(module):
            self._running.append(self._names[module])
            self._record_number()

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._is_ours(module) and self._running:
            name = self._running.pop()
            self._record_number()
            if self._ends is not None:
                with self.unseen():
                    self._ends(name, output)

    def _is_ours(self, module: nn.Module) -> bool:
        return module in self._names and threading.get_ident() == self._thread

    def _record_number(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._ran.append(self._running[-1] if self._running else OUTSIDE)

    def place(self) -> Place:
        """Return the place of the operation that runs now."""
        node: Any = torch._C._current_autograd_node()
        # Modules also run in a backward pass, when a checkpoint recomputes its forward.
        if self._running or node is None:
            return Place(FORWARD, self._running[-1] if self._running else OUTSIDE, "")
        name, number = type(node).__name__, node._sequence_nr()
        if number >= _NO_NUMBER:
            return Place(BACKWARD, self._owners.get(getattr(node, "variable", None), OUTSIDE), name)
        index = bisect_right(self._numbers, number) - 1
        return Place(BACKWARD, self._ran[index] if index >= 0 else OUTSIDE, name)


class OperationsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that calls ``around`` for every operation of this thread and of the backward passes that it starts.

    Args:
        around: called with the operation, its arguments, its keyword arguments, and a function that runs it. It
            returns the operation's result.
    """

    def __init__(self, around: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Run], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._around = around

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], torch.Tensor):
            # Autograd saves the 2.0 of loss * 2.0 as a tensor, which this mode receives as the Python number, and no
            # kernel accepts that. In torch 2.11 to 2.13.
            return args[0]
        return self._around(func, args, named, lambda: func(*args, **named))
