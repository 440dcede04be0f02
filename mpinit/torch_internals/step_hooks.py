"""Step hooks of optimizers, run once around a whole step.

torch's ``Optimizer.step`` runs the optimizer's own hooks and the global ones. mpinit may call it inside a step, once
for each bucket. Hooks would then run several times, and before masters are rounded into their weights.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

from torch.optim import Optimizer
from torch.optim import optimizer as module

_OWN: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL: Final = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether a step of this optimizer would run any user's hook."""
    # Called in every step, where a generator would be one more frame of Python.
    for name in _OWN:
        if getattr(optimizer, name, None):
            return True
    return bool(module._global_optimizer_post_hooks) or len(module._global_optimizer_pre_hooks) > len(_own_hooks)


class StepHooks:
    """The hooks of one step. Inside the block, the optimizer's own step runs none of them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        before, after = _OWN
        # In torch's order: the hooks of all optimizers are the outer ones.
        own: list[Any] = [*getattr(optimizer, before).values()]
        self._before = [h for h in (*module._global_optimizer_pre_hooks.values(), *own) if h not in _own_hooks]
        self._after: list[Any] = [*getattr(optimizer, after).values(), *module._global_optimizer_post_hooks.values()]
        self._hidden: list[tuple[Any, str, Any]] = []

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run the pre-hooks, which may replace the arguments.

        Returns:
            The arguments and keyword arguments of the step.
        """
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
                self._hidden.append((owner, name, getattr(owner, name)))
                setattr(owner, name, OrderedDict())
        return self

    def __exit__(self, *_: object) -> None:
        while self._hidden:
            owner, name, hooks = self._hidden.pop()
            setattr(owner, name, hooks)


@contextmanager
def global_hooks_hidden() -> Iterator[None]:
    """Run no step hook that a user has registered for all optimizers inside the block; mpinit's own run."""
    before = [(name, getattr(module, name)) for name in _GLOBAL]
    for name, hooks in before:
        own = [(key, hook) for key, hook in hooks.items() if hook in _own_hooks]
        setattr(module, name, OrderedDict(own))
    try:
        yield
    finally:
        for name, hooks in before:
            setattr(module, name, hooks)


# mpinit's own step pre-hooks -> their handles.
_own_hooks: Final[dict[Any, Any]] = {}


def register_own_hook(hook: Callable[[Optimizer, Any, Any], None]) -> None:
    """Register a step pre-hook of mpinit for all optimizers; :class:`StepHooks` does not run it."""
    _own_hooks[hook] = module.register_optimizer_step_pre_hook(hook)


def remove_own_hook(hook: Callable[[Optimizer, Any, Any], None]) -> None:
    """Remove the hook, if it is registered."""
    handle = _own_hooks.pop(hook, None)
    if handle is not None:
        handle.remove()
