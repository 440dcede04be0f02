"""Functions of the user's own that follow the casts: how one is wrapped, and the list of those registered."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..basics.trees import cast_tree
from ..torch_internals.native_autocast import call_without_casts, device_types
from .cast_lists import Cast
from .casters import found_dtypes, widest

Function = Callable[..., Any]

_OWNER_PARAMETERS: Final = ("self", "cls", "ctx")


@dataclass(frozen=True)
class Registration:
    """A function registered by name: where it stands and what happens to its arguments."""

    owner: Any
    name: str
    cast: Cast


REGISTERED: Final[list[Registration]] = []


def user_wrapper(cast: Cast, function: Function) -> Function:
    """Wrap a user's function: its arguments, nested containers included, are cast while casts are on.

    A float32 function runs with casts off inside, or the matrix products in its body would go back to 16 bits. A
    builtin function of torch runs with casts off as well, or its native row would have the last word.
    """
    owners = 1 if _takes_owner(function) else 0
    builtin = not isinstance(function, types.FunctionType) or (function.__module__ or "").partition(".")[0] == "torch"
    without_casts = cast is Cast.FP32 or builtin

    @functools.wraps(function)
    def user_function(*args: Any, **kwargs: Any) -> Any:
        dtype = _dtype_for(cast, args[owners:], kwargs)
        if dtype is None:
            return function(*args, **kwargs)
        args = (*args[:owners], *[cast_tree(value, dtype) for value in args[owners:]])
        kwargs = {key: cast_tree(value, dtype) for key, value in kwargs.items()}
        if without_casts:
            return call_without_casts(function, *args, **kwargs)
        return function(*args, **kwargs)

    return user_function


def _takes_owner(function: Function) -> bool:
    """Whether the first argument is an object, a class or an autograd context, which is not to be cast."""
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return False
    return first in _OWNER_PARAMETERS


def _dtype_for(cast: Cast, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """What the arguments are to be cast to now; None where casts are off or nothing is to be cast."""
    on = [device for device in device_types() if torch.is_autocast_enabled(device)]
    if not on:
        return None
    if cast is Cast.LOWER_PRECISION:
        return torch.get_autocast_dtype(on[-1])
    if cast is Cast.FP32:
        return torch.float32
    found: list[torch.dtype] = []
    for leaf in _leaves((*args, *kwargs.values())):
        for device in on:
            found_dtypes(leaf, device, found)
    return widest(found)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    if isinstance(tree, (list, tuple)):
        return [leaf for branch in tree for leaf in _leaves(branch)]
    return [tree]
