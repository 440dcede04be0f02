"""Ask torch for its present mode (tracing, backward, graph capture), and for costs of a device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch.autograd import Variable
from torch.fx import _symbolic_trace

_TRACING_MODES: Final = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def is_tracing_symbolically() -> bool:
    """Return whether torch.fx runs code with proxies instead of tensors.

    Ask ``is_compiling`` first: torch.compile would trace torch.fx's function, which reads thread-local variables.
    """
    return not torch.compiler.is_compiling() and _symbolic_trace.is_fx_symbolic_tracing()


def current_pass() -> int:
    """Return the number of the backward pass that runs in this thread; -1 without one.

    Activation checkpointing runs forwards in a backward pass.
    """
    return int(torch._C._current_graph_task_id())


# The number of the backward pass that this thread is inside of, -1 outside: asked for each gradient.
current_graph_task: Final[Callable[[], int]] = torch._C._current_graph_task_id


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of this thread's backward pass, after DDP has averaged its gradients.

    DDP queues its own callback during the pass. A callback that is queued by a callback runs after it.
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


def is_eager() -> bool:
    """Return whether operations compute numbers now: nothing is traced, and functorch transforms nothing."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACING_MODES)))
    )


# On a CPU, memory past this size goes back to the system after every step and is faulted in again by the next:
# buckets of 16 MiB were measured to step twice as fast as ones of 64.
_CPU_BUCKET_BYTES: Final = 16 * 2**20


def reads_without_sync(device: torch.device) -> bool:
    """Return whether a number is read from the device without a device sync."""
    return device.type == "cpu"


def bucket_bytes_at_most(device: torch.device, wanted: int) -> int:
    """Limit ``wanted``, the bytes of a bucket, to the size that is fastest on the device."""
    return min(wanted, _CPU_BUCKET_BYTES) if device.type == "cpu" else wanted


def works_within_a_cache(device: torch.device) -> bool:
    """Return whether several passes over memory are fastest in pieces that fit into a cache."""
    return device.type == "cpu"


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured: no number may be read meanwhile."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
