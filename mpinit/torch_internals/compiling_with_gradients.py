"""Compilation of models whose 16-bit weights have float32 gradients: the gradients are hidden while it compiles.

torch.compile reads the gradient of every weight that is an input of a graph. If the two dtypes differ, it breaks the
graph, with ``fullgraph=True`` by the error "dtype mismatch between tensor and its gradient", although
``Tensor.grad_dtype`` allows that. So a model would run uncompiled if it was recompiled between a backward pass and
``zero_grad``, for inputs of another shape or in evaluation.
Upstream: https://github.com/pytorch/pytorch/issues/111317, in torch 2.11 to 2.15. This file can be deleted when
dynamo's ``VariableBuilder.wrap_tensor`` reads ``grad_dtype``.

``torch._dynamo.reset()`` drops the callbacks of compilations. :func:`follow_dynamo` registers them again when the next
backward pass begins.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import nn

from ..basics.patching import UndoStack
from ..basics.running import current_pass
from ..basics.weak_references import WeakIdSet

_models: Final[WeakIdSet[nn.Module]] = WeakIdSet()
_hidden: Final[list[tuple[torch.Tensor, torch.Tensor]]] = []


def hide_gradients(models: Sequence[nn.Module], undos: UndoStack) -> None:
    """Hide gradients whose dtype differs from their weight's, while a function is compiled."""

    def undo() -> None:
        for model in models:
            _models.discard(model)
        dynamo: Any = sys.modules.get("torch._dynamo")
        if dynamo is not None and not _models:
            handler = dynamo.callback_handler
            for callbacks, ours in zip((handler.start_callbacks, handler.end_callbacks), _callbacks(), strict=True):
                callbacks[:] = [callback for callback in callbacks if callback is not ours]

    undos.push(undo)
    for model in models:
        _models.add(model)
    follow_dynamo()


def follow_dynamo() -> None:
    """Register the callbacks of compilations, unless they are registered."""
    # torch imports it with the first optimizer. Without an optimizer there are no gradients of another dtype.
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and _models and _callbacks()[0] not in dynamo.callback_handler.start_callbacks:
        dynamo.callback_handler.register_start_callback(_callbacks()[0])
        dynamo.callback_handler.register_end_callback(_callbacks()[1])


@cache
def _callbacks() -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    # Where a compiled function runs a backward pass, dynamo would compile these two, for minutes.
    disable: Any = torch.compiler.disable
    return disable(_hide), disable(_put_back)


def _hide(_: Any) -> None:
    if current_pass() != -1:
        return  # the backward pass is accumulating gradients
    for model in list(_models):
        for weight in model.parameters():
            gradient = weight.grad if weight.is_leaf else None
            if gradient is not None and gradient.dtype is not weight.dtype:
                _hidden.append((weight, gradient))
                weight.grad = None


def _put_back(_: Any) -> None:
    while _hidden:
        weight, gradient = _hidden.pop()
        if weight.grad is None:
            weight.grad = gradient
