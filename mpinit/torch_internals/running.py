"""What torch is doing when a function is called: tracing, or computing forwards again in a backward pass."""

from typing import Final

import torch
from torch.fx import _symbolic_trace

_TRACING_MODES: Final = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def is_tracing_symbolically() -> bool:
    """Whether torch.fx is running code with proxies in the place of tensors.

    torch.fx's own question comes second: a compiler would follow it into the thread's own variables.
    """
    return not torch.compiler.is_compiling() and _symbolic_trace.is_fx_symbolic_tracing()


def current_pass() -> int:
    """The number of the backward pass that this thread is inside of: activation checkpointing runs forwards there."""
    return int(torch._C._current_graph_task_id())


def computes_at_once() -> bool:
    """Whether operations run on numbers that are there afterwards: nothing is traced or transformed."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACING_MODES)))
    )
