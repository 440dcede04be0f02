"""Torch's own clipping of gradients, for those whose gradients are gone when it is called: it would do nothing.

``torch.nn.utils.clip_grad_norm_`` takes parameters, leaves out those without a gradient, and has nothing to clip where
there is none. Not a fault of torch. What it calls with the parameters is wrapped, because scripts hold on to the
function itself: ``_clip_grads_with_norm_`` of torch/nn/utils/clip_grad.py, alike in torch 2.11 to 2.13.
``clip_grad_value_`` calls nothing with them and is wrapped itself, under both of its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from .listeners import Listeners


def _saying_what_it_clips(clip: Callable[..., Any], listeners: Iterable[Any]) -> Callable[..., Any]:
    def tell_and_clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        given = list(given) if isinstance(given, Iterable) else given
        for listener in listeners:
            listener.clipping_begins(given)
        return clip(given, *args, **kwargs)

    return tell_and_clip


_CLIPPINGS: Final = (
    Listeners("torch.nn.utils.clip_grad", "_clip_grads_with_norm_", _saying_what_it_clips),
    Listeners("torch.nn.utils.clip_grad", "clip_grad_value_", _saying_what_it_clips),
    Listeners("torch.nn.utils", "clip_grad_value_", _saying_what_it_clips),
)


def listen_to_clipping(listener: object) -> None:
    """Call its ``clipping_begins(parameters)`` before torch clips gradients; where it raises they are not clipped.

    As long as the listener lives, or until :func:`stop_listening_to_clipping`.
    """
    for clippings in _CLIPPINGS:
        clippings.add(listener)


def stop_listening_to_clipping(listener: object) -> None:
    """Harmless where it never listened."""
    for clippings in _CLIPPINGS:
        clippings.discard(listener)
