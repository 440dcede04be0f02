"""Step hooks of optimizers, run once around a whole step.

torch's ``Optimizer.step`` runs the optimizer's own hooks and the global ones. mpinit may call it inside a step, once
for each bucket. Hooks would then run several times, and before masters are rounded into their weights.
"""

import threading
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
    before, after = _HIDDEN.dicts or (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks)
    return bool(after) or len(before) > len(_own_hooks)


class _HiddenHooks:
    """The hooks of all optimizers, while steps of one or several threads hide them from torch.

    Attributes:
        dicts: torch's dicts of pre-hooks and post-hooks; empty while no step hides them.
    """

    def __init__(self) -> None:
        self.dicts: tuple[Any, ...] = ()
        self._lock = threading.Lock()
        self._users = 0

    def present(self) -> tuple[Any, ...]:
        """Return torch's dicts of pre-hooks and post-hooks, hidden or not."""
        return self.dicts or tuple(getattr(module, name) for name in _GLOBAL)

    def hide(self) -> None:
        """Set empty dicts in their place; each call needs one of :meth:`show`."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self.dicts = self.present()
                for name in _GLOBAL:
                    setattr(module, name, OrderedDict())

    def show(self) -> None:
        """Set torch's dicts again after the last step that hid them, with hooks that were registered since."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for name, hooks in zip(_GLOBAL, self.dicts, strict=True):
                    hooks.update(getattr(module, name))
                    setattr(module, name, hooks)
                self.dicts = ()


_HIDDEN: Final = _HiddenHooks()


class StepHooks:
    """The hooks of one step. Inside the block, the optimizer's own step runs none of them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        before, after = _OWN
        all_before, all_after = _HIDDEN.present()
        # In torch's order: the hooks of all optimizers are the outer ones.
        own: list[Any] = [*getattr(optimizer, before).values()]
        self._before = [h for h in (*all_before.values(), *own) if h not in _own_hooks]
        self._after: list[Any] = [*getattr(optimizer, after).values(), *all_after.values()]
        self._hidden: list[tuple[str, Any]] = []

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
        _HIDDEN.hide()
        for name in _OWN:
            self._hidden.append((name, getattr(self._optimizer, name)))
            setattr(self._optimizer, name, OrderedDict())
        return self

    def __exit__(self, *_: object) -> None:
        while self._hidden:
            name, hooks = self._hidden.pop()
            setattr(self._optimizer, name, hooks)
        _HIDDEN.show()


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
        # A handle that was made during a step refers to the empty dict that was torch's then.
        _HIDDEN.present()[0].pop(handle.id, None)
