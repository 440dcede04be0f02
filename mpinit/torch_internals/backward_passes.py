"""When a backward pass begins and ends: what autograd says of it to those inside, and to those who called it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Final

import torch
from torch.autograd import graph

from .listeners import Listeners

# What every call of backward() and grad() goes through.
_ENGINE: Final = graph._engine_run_backward.__code__


def around_backward(tensor: torch.Tensor, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have something called around every backward pass that goes through a tensor.

    Args:
        tensor: part of a graph.
        before: called when a pass has come to the tensor, and to nothing that the tensor was computed from.
        after: called when that pass is over; not where it raised.

    Example:
        >>> weight = torch.ones((), requires_grad=True)
        >>> loss = weight * 2
        >>> around_backward(loss, lambda: print("begins", weight.grad), lambda: print("ends", weight.grad))
        >>> loss.backward()
        begins None
        ends tensor(2.)
    """
    engine: Any = torch.autograd.Variable._execution_engine

    def reached(gradient: torch.Tensor) -> None:
        before()
        engine.queue_callback(after)

    tensor.register_hook(reached)  # type: ignore[no-untyped-call]


def current_pass() -> int:
    """The number of the backward pass that is running; -1 where none is."""
    return int(torch._C._current_graph_task_id())


class _Silence(threading.local):
    """Whether passes begun in this thread are nobody's business."""

    def __init__(self) -> None:
        self.is_kept = False


_silence: Final = _Silence()


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Passes begun inside are told to nobody: a look at a model, after which everything is as it was."""
    before, _silence.is_kept = _silence.is_kept, True
    try:
        yield
    finally:
        _silence.is_kept = before


def _saying_when_it_is_over(backward: Callable[..., None], listeners: Iterable[Any]) -> Callable[..., None]:
    def tell(is_outermost: bool) -> None:
        for listener in listeners if is_outermost else ():
            listener.backward_ended()

    def backward_and_tell(*args: Any, **kwargs: Any) -> None:
        is_outermost = current_pass() < 0 and not _silence.is_kept
        try:
            backward(*args, **kwargs)
        except BaseException:
            # What arrived until then is there; what listeners say of it would hide what went wrong.
            with contextlib.suppress(RuntimeError):
                tell(is_outermost)
            raise
        tell(is_outermost)

    return backward_and_tell


# Their ``backward_ended()`` is called when a ``backward()`` is over, of whichever graph, also where it raised; not when
# one inside another is. ``Tensor.backward`` calls this function: a hook on each weight would say the same at a tenth of
# the cost of a training step of small layers. A pass by a ``backward`` that was imported by name is not noticed.
ends_of_passes: Final = Listeners("torch.autograd", "backward", _saying_when_it_is_over)


def is_nested() -> bool:
    """Whether the backward pass that is running was begun inside of another: reentrant activation checkpointing does.

    Autograd's engine does not say. Such a pass is a call of torch's in a call of torch's; on a device's own thread,
    which the engine made, the outer one is on another thread.
    """
    depth = 0
    above: FrameType | None = sys._getframe(1)
    while above is not None:
        depth += above.f_code is _ENGINE
        above = above.f_back
    is_the_engines = isinstance(threading.current_thread(), threading._DummyThread)
    return depth > (0 if is_the_engines else 1)
