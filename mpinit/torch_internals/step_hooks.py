"""Step hooks, run once around everything that a step is.

``Optimizer.step`` of torch runs the optimizer's hooks, and those registered for all, inside itself. There they come
between a master's step and its rounding, and once for every part of a step that is done in parts.
"""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Self

from torch.optim import Optimizer
from torch.optim import optimizer as module

from ..basics.patching import UndoStack

_OWN: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL: Final = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def has_step_hooks(optimizer: Optimizer) -> bool:
    # Asked on every step, and a generator would be a frame of Python more for each of them.
    """Return whether any hook would run."""
    for name in _OWN:
        if getattr(optimizer, name, None):
            return True
    return bool(module._global_optimizer_post_hooks) or len(module._global_optimizer_pre_hooks) > len(_handle)


class StepHooks:
    """The hooks of one step: inside the block the optimizer's own step runs none of them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._before, self._after = (
            [hook for hook in (*getattr(module, g).values(), *getattr(optimizer, o).values()) if hook is not _check]
            for g, o in zip(_GLOBAL, _OWN, strict=True)
        )
        self._held: list[tuple[Any, str, Any]] = []

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run what comes before a step; each may return other arguments."""
        for hook in self._before:
            result = hook(self._optimizer, args, kwargs)
            if result is not None:
                if not isinstance(result, tuple) or len(result) != 2:
                    raise RuntimeError(f"{hook} must return None or a tuple of (new_args, new_kwargs), not {result}")
                args, kwargs = result
        return args, kwargs

    def after(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for hook in self._after:
            hook(self._optimizer, args, kwargs)

    def __enter__(self) -> Self:
        for owner, names in ((module, _GLOBAL), (self._optimizer, _OWN)):
            for name in names:
                self._held.append((owner, name, getattr(owner, name)))
                setattr(owner, name, OrderedDict())
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            owner, name, hooks = self._held.pop()
            setattr(owner, name, hooks)


# By the id of its owner.
_checks: Final[dict[int, tuple[weakref.ref[Any], Callable[[Any, Optimizer], None]]]] = {}
_handle: Final[list[Any]] = []


def check_steps(owner: Any, check: Callable[[Any, Optimizer], None], undos: UndoStack) -> None:
    """Have every optimizer of the process checked before it steps: ``check`` raises where it must not.

    ``owner`` is held weakly.
    """
    # Runs by itself where an owner is dropped without it.
    weakref.finalize(owner, _end, id(owner)).atexit = False
    undos.push(functools.partial(_end, id(owner)))
    _checks[id(owner)] = weakref.ref(owner), check
    if not _handle:
        _handle.append(module.register_optimizer_step_pre_hook(_check))


def _end(owner: int) -> None:
    _checks.pop(owner, None)
    if not _checks and _handle:
        _handle.pop().remove()


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for known, check in list(_checks.values()):
        owner = known()
        if owner is not None:
            check(owner, optimizer)
