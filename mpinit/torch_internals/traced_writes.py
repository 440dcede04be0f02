"""In-place writes of code that torch.compile or torch.export traces."""

from typing import Any

import torch


def break_graph_if_written(tensor: torch.Tensor, reason: str) -> None:
    """Stop tracing if the traced code has written in place to a tensor since it was made.

    torch.compile then runs the caller without tracing it; with ``fullgraph=True`` and in torch.export it raises.
    Traced code cannot branch on a version counter. ``comptime`` calls a function while torch.compile traces, and its
    second argument otherwise.

    Args:
        tensor: an intermediate tensor.
        reason: the text of the error.
    """
    torch._dynamo.comptime.comptime(_break_graph, lambda: _refuse(tensor, reason))


def _break_graph(context: Any) -> None:
    # The caller's locals: comptime allows no closure.
    if _is_written(context.get_local("tensor").as_fake()):
        context.graph_break(context.get_local("reason").as_python_constant())


def _refuse(tensor: torch.Tensor, reason: str) -> None:
    if _is_written(tensor):
        raise RuntimeError(reason)


def _is_written(tensor: torch.Tensor) -> bool:
    return not tensor.is_inference() and tensor._version > 0
