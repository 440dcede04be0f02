"""An optimizer's state: cast together with a parameter; and the optimizers that an optimizer wraps."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ..basics.patching import UndoStack
from ..distributed.sharding import local
from ..masters.law import restore_unchanged

# Entries of the states of torch's optimizers that are 0-dimensional whatever the parameter's shape: counters, and the
# rates and products of ASGD and NAdam.
_SCALARS: Final = frozenset({"step", "eta", "mu", "mu_product"})
Casts = Mapping[torch.Tensor, tuple[torch.dtype, torch.dtype]]


def wrapped_by(optimizer: Optimizer) -> list[Optimizer]:
    """List the optimizers among an optimizer's attributes, also in lists and dicts, and those inside of these."""
    found: dict[Optimizer, None] = {}
    _collect(optimizer, found)
    found.pop(optimizer, None)
    return list(found)


def with_wrapped(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """List optimizers, and all that they wrap."""
    return [each for top in optimizers for each in (top, *wrapped_by(top))]


def _collect(optimizer: Optimizer, found: dict[Optimizer, None]) -> None:
    if optimizer in found:
        return
    found[optimizer] = None
    for value in vars(optimizer).values():
        items = value if isinstance(value, (list, tuple)) else list(value.values()) if type(value) is dict else [value]
        for item in items:
            if isinstance(item, Optimizer):
                _collect(item, found)


def cast_state(state: Any, shape: torch.Size, old: torch.dtype, new: torch.dtype, has_master: bool = True) -> Any:
    """Cast the tensors of a parameter's state that have its dtype and shape; return the state.

    Counters, tables of codes, factored statistics and tensors of another dtype are not cast.

    Args:
        state: the state of one parameter; nothing is cast if it is not a dict.
        shape: the parameter's shape.
        old, new: the parameter's dtype before and after.
        has_master: whether the parameter has a master. If not, every tensor that is not 0-dimensional is cast, whatever
            its shape, because the optimizer computes in the parameter's dtype. A state with 8-bit codes is never cast:
            its kernels need the dtypes of its tables and scales.
    """
    if not isinstance(state, dict) or not old.is_floating_point:
        return state
    arrays = (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)
    if any(value.dtype in (torch.uint8, torch.int8) for value in arrays):
        return state
    for key, value in state.items():
        if key in _SCALARS or not isinstance(value, torch.Tensor) or value.dtype != old:
            continue
        if value.shape == shape or (not has_master and value.dim() > 0):
            state[key] = value.to(new)
    return state


def cast_states(optimizers: Sequence[Optimizer], casts: Casts, undos: UndoStack) -> None:
    """Cast the state of parameters that are cast without a master."""
    for optimizer in with_wrapped(optimizers):
        known = {parameter for parameter in optimizer.state if parameter in casts}
        undos.push(functools.partial(_cast_newer_states, weakref.ref(optimizer), casts, known))
        for parameter in known:
            old, new = casts[parameter]
            state = optimizer.state[parameter]
            undos.push(_restorer(state, dict(state), parameter.shape, (new, old)))
            cast_state(state, parameter.shape, old, new, has_master=False)


def _cast_newer_states(reference: weakref.ref[Optimizer], casts: Casts, known: set[torch.Tensor]) -> None:
    optimizer = reference()
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        if parameter in casts and parameter not in known:
            old, new = casts[parameter]
            cast_state(state, parameter.shape, new, old, has_master=False)


def _restorer(
    state: dict[str, Any], before: dict[str, Any], shape: torch.Size, dtypes: tuple[torch.dtype, torch.dtype]
) -> Callable[[], None]:
    def restore() -> None:
        # Values that no step has changed get their original bits; others are cast to the parameter's dtype.
        present = dict(state)
        cast_state(state, shape, *dtypes, has_master=False)
        for key, value in before.items():
            if key in present:
                state[key] = _as_it_was(value, present[key], state[key])

    return restore


def _as_it_was(original: Any, present: Any, widened: Any) -> Any:
    """Return ``widened``, with the original's elements where ``present`` is unchanged since the original was cast."""
    if present is widened:  # the user has replaced it by a tensor of another dtype
        return widened
    if not isinstance(original, torch.Tensor) or original.shape != present.shape or original.is_meta:
        return widened
    here = local(original).to(present.device)
    found = restore_unchanged(here, here.to(present.dtype), local(present))
    if found is here and original.device == present.device:
        return original
    local(widened).copy_(found)
    return widened
