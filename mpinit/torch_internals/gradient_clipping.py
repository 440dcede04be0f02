"""Torch's own clipping of gradients, for those whose gradients are gone when it is called: it would do nothing.

``torch.nn.utils.clip_grad_norm_`` takes parameters, leaves out those without a gradient, and has nothing to clip where
there is none. Not a fault of torch. What it calls with the parameters is wrapped, because scripts hold on to the
function itself: ``_clip_grads_with_norm_`` of torch/nn/utils/clip_grad.py, alike in torch 2.11 to 2.13.
``clip_grad_value_`` calls nothing with them and is wrapped itself, under both of its names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final

import torch

from ..basics.patching import Undo
from .patches_on_import import PatchesOnImport

Check = Callable[[list[torch.Tensor]], None]

_checks: Final[dict[int, Check]] = {}


def before_clipping(check: Check) -> Undo:
    """Have parameters checked before torch clips their gradients.

    Args:
        check: takes the parameters; raises where their gradients must not be clipped.

    Returns:
        What ends it.
    """
    number = id(check)
    _checks[number] = check
    for patches in _PATCHES:
        patches.need(number)

    def end() -> None:
        _checks.pop(number, None)
        for patches in _PATCHES:
            patches.need_no_more(number)

    return end


def _checked(inner: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @functools.wraps(inner)
    def wrapper(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        given = list(given) if isinstance(given, Iterable) else given
        for check in list(_checks.values()):
            check(given)
        return inner(given, *args, **kwargs)

    return wrapper


_PATCHES: Final = (
    PatchesOnImport(
        "torch.nn.utils.clip_grad", dict.fromkeys(("_clip_grads_with_norm_", "clip_grad_value_"), _checked)
    ),
    PatchesOnImport("torch.nn.utils", {"clip_grad_value_": _checked}),
)
