"""What torch is doing when a function is called: tracing, or computing forwards again in a backward pass."""

from __future__ import annotations

import torch
from torch.fx import _symbolic_trace

from .devices import is_capturing


def is_tracing_symbolically() -> bool:
    """Whether torch.fx is running code with proxies in the place of tensors.

    torch.fx's own question comes second: a compiler would follow it into the thread's own variables.

    Example:
        >>> is_tracing_symbolically()
        False
    """
    return not torch.compiler.is_compiling() and _symbolic_trace.is_fx_symbolic_tracing()


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: activation checkpointing runs forwards again there.

    Example:
        >>> in_backward()
        False
    """
    return torch._C._current_graph_task_id() != -1


def computes_at_once() -> bool:
    """Whether operations run now, on numbers that are there afterwards: nothing is traced, transformed or captured.

    Example:
        >>> computes_at_once()
        True
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or is_capturing()
    )
