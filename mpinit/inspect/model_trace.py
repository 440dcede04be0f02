"""One or more runs of a model with every operation seen, and known by the module that it belongs to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, final

import torch
from torch import nn

from ..torch_internals.operations import OperationsSeen, next_number, running_node

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
# What operations belong to that no module of the model made: the loss, most of all.
OUTSIDE: Final = None


class Tracer(ABC):
    """Is shown what happens."""

    @abstractmethod
    def operation(
        self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run an operation and return its result."""

    @abstractmethod
    def module_begins(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module's forward begins ("" is the model itself)."""

    @abstractmethod
    def module_ends(self, name: str, output: Any) -> None:
        """It has returned."""


@final
class ModelTrace:
    """While it is entered, a tracer is shown the operations and modules of ``model``; afterwards all hooks are gone.

    Args:
        model: the model.
        tracer: what looks.
    """

    def __init__(self, model: nn.Module, tracer: Tracer) -> None:
        self._model = model
        self._tracer = tracer
        self._mode: Any = OperationsSeen(tracer.operation)
        self._hooks: list[Any] = []
        # The modules that run, innermost last, with the number their first node would have.
        self._running: list[tuple[str, int]] = []
        # Calls that are over, inner ones before those they were in: first number, number after the last, name.
        self._calls: list[tuple[int, int, str]] = []
        self._found: dict[int, str | None] = {}

    def __enter__(self) -> ModelTrace:
        try:
            for name, module in self._model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    self._hook(name, module)
            self._mode.__enter__()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._mode.__exit__(kind, error, traceback)
        finally:
            self._remove()

    def _hook(self, name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append((name, next_number()))
            self._tracer.module_begins(name, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            # Whatever an exception has left open inside ends here too.
            while self._running:
                running, first = self._running.pop()
                self._calls.append((first, next_number(), running))
                if running == name:
                    break
            self._tracer.module_ends(name, output)

        self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self._hooks.append(module.register_forward_hook(after, always_call=True))

    def _remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def place(self) -> tuple[str, str | None]:
        """Where the program is: forward or backward, and the module's name (None: in none of them)."""
        if self._running:
            return FORWARD, self._running[-1][0]
        node = running_node()
        if node is None:
            return FORWARD, OUTSIDE
        number = node[1]
        if number not in self._found:
            inside = (name for first, after, name in self._calls if first <= number < after)
            self._found[number] = next(inside, OUTSIDE)
        return BACKWARD, self._found[number]
