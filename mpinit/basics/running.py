"""torch's present mode (tracing, backward pass, graph capture), and properties of devices."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, ParamSpec, TypeVar

import torch
from torch.autograd import Variable
from torch.fx import _symbolic_trace

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_TRACING_MODES: Final = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def is_tracing_symbolically() -> bool:
    """Return whether torch.fx runs code with proxies instead of tensors.

    Check ``is_compiling`` first: torch.compile would trace torch.fx's function, which reads thread-local variables.
    """
    return not torch.compiler.is_compiling() and _symbolic_trace.is_fx_symbolic_tracing()


def current_pass() -> int:
    """Return the number of the backward pass that runs in this thread, or -1.

    A forward may run in a backward pass: activation checkpointing does that.
    """
    return int(torch._C._current_graph_task_id())


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of this thread's backward pass, after DDP has averaged its gradients.

    DDP queues its own callback during the pass. A callback that a callback queues runs after it.
    """
    queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


def without_gradients(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Switch gradients off in a function, as the decorator ``torch.no_grad()`` does, in a quarter of its time.

    For functions that each iteration runs: at O2 seven.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)  # inside, because Ctrl-C may arrive at the end of this call
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return run


def constant_when_compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let dynamo call a function once while it traces a forward, and take its result for a constant.

    ``torch.compiler.assume_constant_result`` sets the same attribute, and imports dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@contextmanager
def without_tracing() -> Iterator[None]:
    """Stop torch.jit.trace from recording operations inside the block.

    torch.jit.trace traces a model twice and compares the graphs; work that is done only once would differ.
    """
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def is_eager() -> bool:
    """Return whether operations compute numbers now: no tracing, and no functorch transform."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACING_MODES)))
    )


# Larger buckets leave a CPU's cache between reading, stepping and rounding; smaller ones have more calls of the
# optimizer's step, which looks at all parameters each time. Of 4, 6, 8 and 16 MiB, steps of 16 M weights were fastest.
_CPU_BUCKET_BYTES: Final = 8 * 2**20


def reads_without_sync(device: torch.device) -> bool:
    """Return whether reading a number from the device needs no device sync."""
    return device.type == "cpu"


def bucket_bytes_at_most(device: torch.device, wanted: int) -> int:
    """Limit ``wanted``, the bytes of a bucket, to the largest size that is fast on the device."""
    return min(wanted, _CPU_BUCKET_BYTES) if device.type == "cpu" else wanted


def is_faster_in_chunks(device: torch.device) -> bool:
    """Return whether a loop of operations is faster on chunks that fit into the processor's cache."""
    return device.type == "cpu"


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, which forbids reading numbers from the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
