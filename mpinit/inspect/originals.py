"""Guards of a model and its optimizer while copies of them run: calls of the originals raise, and changes are found."""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.patching import UndoStack

_NO_VALUE: Final = object()


@contextmanager
def forward_refused(model: nn.Module, copied: nn.Module, tool: str, advice: str) -> Iterator[None]:
    """Raise a ValueError in the block if any module of the original is called; scripted modules are not checked.

    A lambda, a hook or a closure of the model's may refer to a module of the original, which a copy of it then runs.
    """

    def refuse(module: nn.Module, args: Any) -> NoReturn:
        what = "the model itself" if module is model else f"{names[module]!r} of the model itself"
        raise ValueError(f"{what} was run inside {tool}, and not the copy of it: {advice}. Nothing was changed")

    names = {module: name for name, module in model.named_modules()}
    # A model may share modules with its copies, through a __deepcopy__ of its own.
    shared = set(copied.modules())
    with UndoStack() as hooks:
        for module in names:
            if module not in shared and not isinstance(module, torch.jit.ScriptModule):
                hooks.push(module.register_forward_pre_hook(refuse, prepend=True).remove)
        try:
            yield
        finally:
            hooks.unwind()


class Originals:
    """The state of a model and its optimizer when copies of them begin to train.

    Tensors are compared by their versions, because copies of all values would need as much memory as the model.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._versions = [(name, tensor, _version(tensor)) for name, tensor in tensors]
        self._gradients = [(name, p, p.grad, _version(p.grad)) for name, p in model.named_parameters()]
        self._groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]

    @contextmanager
    def calls_refused(self) -> Iterator[None]:
        """Raise a ValueError in the block if the original optimizer's ``step`` or ``zero_grad`` is called."""

        def refusal(name: str) -> Any:
            def refuse(_: Optimizer, *args: Any, **kwargs: Any) -> NoReturn:
                raise ValueError(
                    f"step(model, optimizer) called {name}() of the optimizer that was passed to mpinit.suggest, and "
                    "not of its copy: let it use its arguments. Nothing was changed"
                )

            # A bound method, because schedulers read step.__func__.
            return types.MethodType(refuse, self._optimizer)

        with UndoStack() as patches:
            # Not a step pre-hook: an optimizer of a session may skip the step before its hooks, and count it.
            for name in ("step", "zero_grad"):
                patches.set_attribute(self._optimizer, name, refusal(name))
            try:
                yield
            finally:
                patches.unwind()

    def check(self) -> None:
        """Raise a ValueError if the originals have changed. Gradients and groups are restored before."""
        for name, tensor, version in self._versions:
            if _version(tensor) != version:
                raise ValueError(
                    f"step(model, optimizer) wrote to {name!r} of the model that was passed to mpinit.suggest, and not "
                    "only to its copy: let it use its arguments. The values from before are lost"
                )
        lost = [name for name, _, gradient, version in self._gradients if _version(gradient) != version]
        replaced = [name for name, parameter, gradient, _ in self._gradients if parameter.grad is not gradient]
        for _, parameter, gradient, _ in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        if lost or replaced:
            raise ValueError(
                f"step(model, optimizer) changed the gradient of {(lost or replaced)[0]!r} in the model that was "
                "passed to mpinit.suggest, and not only in its copy: let it use its arguments. "
                + ("The values from before are lost" if lost else "The gradients were restored")
            )
        changed = self._restore_groups()
        if changed:
            raise ValueError(
                f"step(model, optimizer) changed {', '.join(map(repr, changed))} in the groups of the optimizer that "
                "was passed to mpinit.suggest, as the step() of a scheduler does: step schedulers outside of it. The "
                "groups were restored; a scheduler has counted a step more"
            )

    def _restore_groups(self) -> list[str]:
        changed: dict[str, None] = {}
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=False):
            for key, value in before.items():
                if not _is_same(group.get(key, _NO_VALUE), value):
                    group[key] = _copied(value)
                    changed[key] = None
        return list(changed)


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_same(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
        return value.shape == before.shape and torch.equal(value, before)
    return value is before or bool(value == before)
