"""The methods of an optimizer that mpinit patches: they run the optimizer's own code on float32 masters."""

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch.optim import Optimizer

from ..autocast.thread_flags import CastsAs
from ..basics.patching import UndoStack
from ..masters.states import decode, decoded_state_dict
from .members import wrapped_by
from .step import Closure, ManagedOptimizer, renew_weight_casts, unbound

_LOAD: Final = "load_state_dict"


def patch(managed: ManagedOptimizer, undos: UndoStack, owner: object) -> None:
    """Patch an optimizer's methods, which then run on float32 masters.

    A patched method is a function: a bound method as an attribute of its optimizer would be a reference cycle.

    Args:
        owner: an object that the patched methods keep alive.
    """
    optimizer = managed.optimizer

    def step(closure: Closure | None = None, *args: Any, **kwargs: Any) -> Any:
        return managed.step(closure, *args, **kwargs)

    step.owner, step.managed = owner, managed  # type: ignore[attr-defined]
    # It sets ``optimizer._opt_called`` itself, so LR schedulers, which would read ``step.__func__``, need not wrap it.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    undos.push(partial(_end, weakref.ref(managed)))
    if managed.shared.states is not None:
        with managed.params.masters_in_groups():
            pass  # the end encodes the state that the optimizer has already
        for holder in managed.params.groups.holders():
            if hasattr(holder, "_optimizer_state_dict_post_hooks"):
                undos.push(holder.register_state_dict_post_hook(lambda _, state: decoded_state_dict(state)).remove)
    methods = [(optimizer, name, _on_masters(managed, optimizer, name)) for name in (_LOAD, *_own_methods(optimizer))]
    # A wrapped optimizer's load_state_dict would cast state to the dtype of the weights, too.
    methods += [(inner, _LOAD, _on_masters(managed, inner, _LOAD)) for inner in wrapped_by(optimizer)]
    for each, name, method in [(optimizer, "step", step), *methods]:
        # Other code may wrap this method later. The undo cannot remove it then: it calls the optimizer's own.
        undos.set_attribute(each, name, method, stays_wrapped=True)
    managed.is_patched = True


def _end(known: weakref.ref[ManagedOptimizer]) -> None:
    """Release the memory of steps, and convert the optimizer's state back to float32, unless it was freed."""
    managed = known()
    if managed is not None:
        managed.is_patched = False
    if managed is not None and managed.reference() is not None:
        managed.params.release()
        for holder in managed.params.groups.holders() if managed.shared.states is not None else ():
            decode([state for state in holder.state.values() if isinstance(state, dict)])


def _on_masters(managed: ManagedOptimizer, optimizer: Optimizer, name: str) -> Callable[..., Any]:
    """Make a method that runs a method of an optimizer, or of one that it wraps, on float32 masters."""
    known, own = weakref.ref(optimizer), unbound(optimizer, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        optimizer, params = known(), managed.params
        if not managed.is_patched or params.is_open:
            return own(optimizer, *args, **kwargs)
        what = f"optimizer.{name}()"
        managed.check_outside(what)
        managed.shared.masters.follow_writes()
        with CastsAs(), params.masters_in_groups_for_load() if name == _LOAD else params.masters_in_groups():
            result = own(optimizer, *args, **kwargs)
        renew_weight_casts()
        return result

    method.__name__, method.__doc__ = name, getattr(optimizer, name).__doc__
    return method


def _own_methods(optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's public methods that torch's do not have, such as schedule-free's ``eval``."""
    known = set(dir(Optimizer))
    names = dict.fromkeys([name for cls in type(optimizer).__mro__ for name in vars(cls)])
    return [
        name
        for name in names
        if not name.startswith("_")
        and name not in known
        and inspect.isfunction(getattr(type(optimizer), name, None))
        and not isinstance(inspect.getattr_static(type(optimizer), name), staticmethod)
    ]
