"""An optimizer's state, cast together with a parameter."""

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ..basics.dtypes import LOWER_PRECISION
from ..basics.patching import UndoStack
from .members import with_wrapped

# Entries of the states of torch's optimizers that are 0-dimensional whatever the parameter's shape: counters, and the
# rates and products of ASGD and NAdam.
_SCALARS: Final = frozenset({"step", "eta", "mu", "mu_product"})
Casts = Mapping[torch.Tensor, tuple[torch.dtype, torch.dtype]]


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


def widen_state(state: Any) -> None:
    """Cast a parameter's 16-bit state to float32, because the parameter has got a float32 master."""
    if not isinstance(state, dict):
        return
    values = [value for value in state.values() if isinstance(value, torch.Tensor)]
    if any(value.dtype in (torch.uint8, torch.int8) for value in values):
        return  # codes, whose scales have dtypes of their own
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dtype in LOWER_PRECISION:
            state[key] = value.to(torch.float32)


def cast_states(optimizers: Sequence[Optimizer], casts: Casts, undos: UndoStack) -> None:
    """Cast the state of parameters that are cast without a master; the undo casts it back."""
    for optimizer in with_wrapped(optimizers):
        undos.push(functools.partial(_cast_back, weakref.ref(optimizer), casts))
        for parameter, state in optimizer.state.items():
            if parameter in casts:
                cast_state(state, parameter.shape, *casts[parameter], has_master=False)


def _cast_back(reference: weakref.ref[Optimizer], casts: Casts) -> None:
    optimizer = reference()
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        if parameter in casts:
            old, new = casts[parameter]
            cast_state(state, parameter.shape, new, old, has_master=False)
