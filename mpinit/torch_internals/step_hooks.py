"""Step hooks, run once around everything that a step is.

``Optimizer.step`` of torch runs the optimizer's hooks, and those registered for all, inside itself. There they come
between a master's step and its rounding, and once for every part of a step that is done in parts.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Self

from torch.optim import Optimizer
from torch.optim import optimizer as module

_OWN: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL: Final = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether any hook would run."""
    # Called in every step, where a generator would be one more frame of Python.
    for name in _OWN:
        if getattr(optimizer, name, None):
            return True
    return bool(module._global_optimizer_post_hooks) or len(module._global_optimizer_pre_hooks) > len(_own_hooks)


class StepHooks:
    """The hooks of one step: inside the block the optimizer's own step runs none of them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._before, self._after = (
            [hook for hook in (*getattr(module, g).values(), *getattr(optimizer, o).values()) if hook not in _own_hooks]
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


# Step pre-hooks of the package itself, and their handles.
_own_hooks: Final[dict[Any, Any]] = {}


def register_own_hook(hook: Callable[[Optimizer, Any, Any], None]) -> None:
    """Register a step pre-hook for all optimizers, which is no user's: :class:`StepHooks` leaves it out."""
    _own_hooks[hook] = module.register_optimizer_step_pre_hook(hook)


def remove_own_hook(hook: Callable[[Optimizer, Any, Any], None]) -> None:
    """Remove the hook, where it is registered."""
    handle = _own_hooks.pop(hook, None)
    if handle is not None:
        handle.remove()
