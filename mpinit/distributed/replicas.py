"""DistributedDataParallel: its events and state, and broadcasts of masters, which it lacks.

The class costs no import: ``import torch`` loads it.
"""

import enum
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from ..basics.patching import SharedPatches
from ..basics.weak_references import WeakIdSet

# Bytes sent in one call.
_CHUNK: Final = 1 << 26


def is_joining(wrapper: Any) -> bool:
    """Return whether a DistributedDataParallel is in ``join()``.

    There, ranks that have no batch left run the same collectives as DistributedDataParallel, but none of mpinit's.
    """
    return bool(wrapper._join_config.enable)


def reduced_by(wrapper: Any) -> list[nn.Parameter]:
    """List the parameters whose gradients a DistributedDataParallel reduces in buckets."""
    # A wrapper whose __init__ or deletion was interrupted has no module.
    module = vars(wrapper).get("_modules", {}).get("module")
    return list(getattr(wrapper, "_module_parameters", None) or (() if module is None else module.parameters()))


def delayed_by(wrapper: Any) -> list[nn.Parameter]:
    """List the parameters whose gradients a DistributedDataParallel reduces later, in a buffer of their own."""
    return list(getattr(wrapper, "_delay_all_reduce_params", ()))


def synced_by(wrapper: Any) -> list[torch.Tensor]:
    """List the parameters and buffers that a DistributedDataParallel broadcasts at the end of ``join()``."""
    ignored, module = wrapper.parameters_to_ignore, wrapper.module
    named = [*module.named_parameters(), *(module.named_buffers() if wrapper.broadcast_buffers else ())]
    return [tensor for name, tensor in named if name not in ignored]


def hooks_of(wrapper: Any) -> list[str]:
    """List the names of a DistributedDataParallel's communication hooks."""
    # A wrapper that delays the reduction of all parameters has no buckets, and no list of hooks.
    return [getattr(hook, "__name__", "") for hook, _ in getattr(wrapper, "_comm_hooks", ())]


@torch.no_grad()
def broadcast(values: Sequence[Callable[[], torch.Tensor]], src: int, group: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Send float32 numbers from one rank to all others, a few at a time.

    Yields:
        On the receiving ranks: an index of ``values``, and the value of rank ``src`` there, in a new tensor. On
        ``src``: nothing.
    """
    distributed: Any = torch.distributed
    receives = distributed.get_rank(group) != src
    for first, chunk in _chunks(values):
        flat = torch.cat([part.reshape(-1) for part in chunk])
        distributed.broadcast(flat, group=group, group_src=src)
        if receives:
            parts = torch.split(flat, [part.numel() for part in chunk])
            for index, (part, old) in enumerate(zip(parts, chunk, strict=True)):
                yield first + index, part.view(old.shape)


def _chunks(values: Sequence[Callable[[], torch.Tensor]]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    chunk: list[torch.Tensor] = []
    first = size = 0
    for index, get in enumerate(values):
        value = get().detach()
        if chunk and (size + 4 * value.numel() > _CHUNK or chunk[0].device != value.device):
            yield first, chunk
            chunk, first, size = [], index, 0
        chunk.append(value)
        size += 4 * value.numel()
    if chunk:
        yield first, chunk


class Event(enum.Enum):
    """An event in the life of a DistributedDataParallel.

    Its ``module`` is registered before ``MADE``; torch's registration hooks see that.
    """

    MADE = "its __init__ has ended"
    CALLED = "its forward begins"
    RETURNED = "its forward has ended"
    JOINING = "join() begins"
    JOINED = "join() has ended, and has made the ranks' weights one"


# The DistributedDataParallels that were constructed with init_sync=False.
_unsynced: Final[WeakIdSet[Any]] = WeakIdSet()


def syncs_when_made(wrapper: Any) -> bool:
    """Return whether a DistributedDataParallel broadcasts in its ``__init__``.

    Return True, too, if it was constructed before the class was patched: ``init_sync`` is then unknown.
    """
    return wrapper not in _unsynced


def _report(event: Event, wrapper: Any, output: Any = None) -> None:
    for user in WRAPPERS.users:
        user(event, wrapper, output)


def _init(inner: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> None:
    try:
        arguments = inspect.signature(inner).bind(wrapper, *args, **kwargs).arguments
    except TypeError:
        arguments = {}  # torch's own __init__ raises for them
    if not arguments.get("init_sync", True):
        _unsynced.add(wrapper)
    inner(wrapper, *args, **kwargs)
    _report(Event.MADE, wrapper)


def _pre_forward(inner: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    _report(Event.CALLED, wrapper)
    return inner(wrapper, *args, **kwargs)


def _post_forward(inner: Callable[..., Any], wrapper: Any, output: Any) -> Any:
    result = inner(wrapper, output)
    _report(Event.RETURNED, wrapper, result)
    return result


def _join_hook(inner: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    _report(Event.JOINING, wrapper)
    return _JoinHook(wrapper, inner(wrapper, *args, **kwargs))


class _JoinHook:
    """A DistributedDataParallel's ``JoinHook``, with an event at its end."""

    def __init__(self, wrapper: Any, inner: Any) -> None:
        self._wrapper, self.main_hook, self._post_hook = wrapper, inner.main_hook, inner.post_hook

    def post_hook(self, is_last_joiner: bool) -> None:
        """Let torch broadcast the 16-bit weights, then report that."""
        self._post_hook(is_last_joiner)
        _report(Event.JOINED, self._wrapper)


# Each user of these patches is called with an Event, the wrapper, and the output of a forward that has ended. The class
# is patched, because a wrapper may be older than all sessions. torch has no hook at the end of __init__; earlier there
# is no reducer for a communication hook, and later the arguments are unknown. A global forward hook would slow all
# modules. One of the model would miss wrappers of its parts, and be traced by torch.compile, which never traces
# DistributedDataParallel's own forward.
WRAPPERS: Final = SharedPatches(
    nn.parallel.DistributedDataParallel,
    {"__init__": _init, "_pre_forward": _pre_forward, "_post_forward": _post_forward, "join_hook": _join_hook},
)


def refuse_training(wrapper: Any) -> None:
    """Refuse to train with a DistributedDataParallel whose parameters have another dtype than it was made for.

    torch silently drops its hooks then, and no gradient is reduced. Evaluation still works.
    """
    wrapper.register_forward_pre_hook(_refuse_in_training)


def _refuse_in_training(wrapper: nn.Module, args: Any) -> None:
    if torch.is_grad_enabled() and wrapper.training:
        name = type(wrapper).__name__
        raise RuntimeError(
            f"this {name} was made around 16-bit weights, which mpinit.undo has cast back to float32: it would "
            f"not reduce gradients over ranks any more. Wrap the model again, model = {name}(model), or evaluate "
            "with it under torch.no_grad()"
        )
