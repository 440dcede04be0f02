"""When a backward pass begins and ends: autograd's engine says so to who asks inside of it, as DDP does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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


def at_the_very_end(callback: Callable[[], None]) -> None:
    """Have something called when the backward pass that is running is over, after what others have asked for till then.

    DistributedDataParallel hands its gradients out in such a callback, asked for in the middle of the pass.

    Args:
        callback: not called where the pass raises.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(callback))
