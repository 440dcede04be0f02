"""Runs of a model with every operation seen, and known by the module that it belongs to."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from ..torch_internals.operations import OperationsSeen, next_number, running_node

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
# What operations belong to that no module of the model made: the loss, most of all.
OUTSIDE: Final = None


class Place(NamedTuple):
    """Where the program is.

    Attributes:
        phase: "forward" or "backward".
        module: the dotted name of the module; "" is the model itself, None what is outside of it.
        node: the name of the node of the backward graph that runs; "" in a forward.
    """

    phase: str
    module: str | None
    node: str


class Watcher(ABC):
    """Is shown what happens."""

    @abstractmethod
    def operation(
        self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run an operation and return its result."""

    @abstractmethod
    def module_begins(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module's forward begins ("" is the model itself), with these positional arguments."""

    @abstractmethod
    def module_ends(self, name: str, output: Any) -> None:
        """It has returned, or raised."""


@final
class ModelTrace:
    """While it is entered, a watcher is shown the operations and modules of ``model``; afterwards all hooks are gone.

    A backward operation belongs to the module in whose forward its node was made: the numbers that autograd gives its
    nodes rise, so it is enough to know which module ran from which number on.

    Args:
        model: the model.
        watcher: what looks.
    """

    def __init__(self, model: nn.Module, watcher: Watcher) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._owners: dict[torch.Tensor, str] = {p: name.rpartition(".")[0] for name, p in model.named_parameters()}
        self._watcher = watcher
        self._mode: Any = OperationsSeen(watcher.operation)
        self._thread = threading.get_ident()
        self._hooks: list[Any] = []
        self._running: list[str] = []
        self._numbers: list[int] = []
        self._ran: list[str | None] = []

    def __enter__(self) -> ModelTrace:
        # Hooks of the process: modules with hooks of their own take other paths.
        self._hooks.append(module_hooks.register_module_forward_pre_hook(self._begin))
        try:
            self._hooks.append(module_hooks.register_module_forward_hook(self._end, always_call=True))
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

    def _remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if self._is_ours(module):
            self._running.append(self._names[module])
            self._note()
            self._watcher.module_begins(self._names[module], module, inputs)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._is_ours(module) and self._running:
            name = self._running.pop()
            self._note()
            self._watcher.module_ends(name, output)

    def _is_ours(self, module: nn.Module) -> bool:
        return module in self._names and threading.get_ident() == self._thread

    def _note(self) -> None:
        self._numbers.append(next_number())
        self._ran.append(self._running[-1] if self._running else OUTSIDE)

    def place(self) -> Place:
        """Where the program is."""
        node = running_node()
        # While a forward is computed again in the backward pass, modules run.
        if self._running or node is None:
            return Place(FORWARD, self._running[-1] if self._running else OUTSIDE, "")
        if node.leaf is not None:
            return Place(BACKWARD, self._owners.get(node.leaf, OUTSIDE), node.name)
        index = bisect_right(self._numbers, node.number) - 1
        return Place(BACKWARD, self._ran[index] if index >= 0 else OUTSIDE, node.name)
