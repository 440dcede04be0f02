"""What torch is doing when a function is called, and what is known of the device that it runs on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch.autograd import Variable
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


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs in this thread is over, and DDP has averaged its gradients.

    DDP's own callback is queued in the pass; one that is queued by a callback comes after it.
    """
    queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


@contextmanager
def out_of_traces() -> Iterator[None]:
    """Let torch.jit.trace record nothing inside the block: what runs there belongs to no graph.

    Work that is done once would be in the first of two graphs of a model, and torch.jit.trace compares two.
    """
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def computes_at_once() -> bool:
    """Whether operations run on numbers that are there afterwards: nothing is traced or transformed."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACING_MODES)))
    )


# On a CPU, memory past this size goes back to the system after every step and is faulted in again by the next:
# buckets of 16 MiB were measured to step twice as fast as ones of 64.
_CPU_BUCKET_BYTES: Final = 16 * 2**20


def is_read_freely(device: torch.device) -> bool:
    """Whether reading a number off the device waits for nothing."""
    return device.type == "cpu"


def bucket_bytes_at_most(device: torch.device, wanted: int) -> int:
    """How many bytes are best worked on at a time, of those ``wanted``."""
    return min(wanted, _CPU_BUCKET_BYTES) if device.type == "cpu" else wanted


def works_within_a_cache(device: torch.device) -> bool:
    """Whether several passes over memory are best done on parts that stay in a cache between them."""
    return device.type == "cpu"


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, during which nothing may be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
