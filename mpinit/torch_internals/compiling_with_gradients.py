"""torch.compile while 16-bit weights hold float32 gradients: the gradients are out of sight as long as it looks.

The fault: torch.compile looks at the gradient of every weight a graph takes in, and refuses one of another dtype than
its weight's, though ``Tensor.grad_dtype`` allows it ("dtype mismatch between tensor and its gradient"). So a model that
is compiled anew between a backward pass and ``zero_grad``, for inputs of another shape or in evaluation, would fail.
Upstream: https://github.com/pytorch/pytorch/issues/111317, in torch 2.11 to 2.13. It can go when dynamo's
``VariableBuilder.wrap_tensor`` reads ``grad_dtype``.

``torch._dynamo.reset()`` forgets who wants to know of compilations, and is told again at once.

Compiled autograd (``torch._dynamo.compiled_autograd._enable``) has the same fault, and no gradients to hide help: what
stands for a gradient while a backward pass is recorded has the weight's type. It fails there, and is explained here.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

from ..basics.patching import Undo
from .listeners import Listeners
from .running import in_backward

_owners: Final[weakref.WeakKeyDictionary[Any, Callable[[Any], Iterable[torch.Tensor]]]] = weakref.WeakKeyDictionary()
_hidden: Final[list[tuple[torch.Tensor, torch.Tensor]]] = []


def hide_gradients(owner: Any, weights_of: Callable[[Any], Iterable[torch.Tensor]]) -> Undo:
    """Take gradients of another dtype than their weight's away whenever a function is compiled, and put them back.

    Args:
        owner: whose weights they are; held weakly.
        weights_of: owner -> the weights it has then.

    Returns:
        The undo.
    """
    _owners[owner] = weights_of
    # Made with the first optimizer of a process; before there is one there are no gradients of another dtype either.
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        _tell_of_compilations(dynamo.callback_handler)

    _compiled_backwards.add(owner)

    def undo() -> None:
        _owners.pop(owner, None)
        _compiled_backwards.discard(owner)

    return undo


def _tell_of_compilations(handler: Any) -> None:
    if _hide in handler.start_callbacks:
        return
    handler.register_start_callback(_hide)
    handler.register_end_callback(_put_back)
    if "clear" in vars(handler):
        return

    def clear() -> None:
        type(handler).clear(handler)
        if len(_owners):
            _tell_of_compilations(handler)

    handler.clear = clear


def _hide(_: Any) -> None:
    if in_backward():
        return  # gradients are being added to
    for owner, weights_of in list(_owners.items()):
        for weight in weights_of(owner):
            gradient = weight.grad if weight.is_leaf else None
            if gradient is not None and gradient.dtype is not weight.dtype:
                _hidden.append((weight, gradient))
                weight.grad = None


def _put_back(_: Any) -> None:
    while _hidden:
        weight, gradient = _hidden.pop()
        if weight.grad is None:
            weight.grad = gradient


_REFUSED: Final = (
    "compiled autograd cannot record a backward pass that leaves float32 gradients on 16-bit weights, as "
    "mpinit.initialize has autograd do at O2 and O5: run this backward pass without it (torch.compile(model), or of "
    "model and loss, compiles the backward pass as well), or choose opt_level='O1' or 'O4'"
)


def _explaining(enable: Callable[..., Any], owners: Iterable[Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def enable_and_explain(*args: Any, **kwargs: Any) -> Iterator[None]:
        try:
            with enable(*args, **kwargs):
                yield
        except RuntimeError as error:
            # What never meets such a weight works.
            if "with grad_dtype" in str(error) and any(True for _ in owners):
                raise RuntimeError(_REFUSED) from error
            raise

    return enable_and_explain


_compiled_backwards: Final = Listeners("torch._dynamo.compiled_autograd", "_enable", _explaining)
