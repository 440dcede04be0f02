"""DistributedDataParallel: reading its state, float32 reduction, and broadcasts of masters, which it does not see.

Nothing is imported for it: torch itself has loaded the class.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from .sharding import is_distributed

# Bytes sent in one call.
_CHUNK: Final = 1 << 26


def running_wrapper() -> Any:
    """Return the DistributedDataParallel whose forward is running; None outside of one."""
    return nn.parallel.DistributedDataParallel._active_ddp_module if is_distributed() else None


def is_joining(wrapper: Any) -> bool:
    """Return whether a DistributedDataParallel is in ``join()``, where ended ranks shadow its own collectives only."""
    return bool(wrapper._join_config.enable)


def reduced_by(wrapper: Any) -> list[nn.Parameter]:
    """List the parameters whose gradients a DistributedDataParallel reduces."""
    # A wrapper whose __init__ or deletion was interrupted has no module.
    module = vars(wrapper).get("_modules", {}).get("module")
    return list(getattr(wrapper, "_module_parameters", None) or (() if module is None else module.parameters()))


def hooks_of(wrapper: Any) -> list[str]:
    """List the names of a DistributedDataParallel's communication hooks."""
    return [getattr(hook, "__name__", "") for hook, _ in wrapper._comm_hooks]


def reduce_in_float32(wrapper: Any) -> None:
    """Let a DistributedDataParallel average 16-bit gradients in float32, and round them once.

    Raises:
        RuntimeError: it has another communication hook.
    """
    others = [name for name in hooks_of(wrapper) if name != _average_in_float32.__name__]
    if others:
        raise RuntimeError(
            f"reduce_dtype=torch.float32 contradicts {others[0]}, by which DistributedDataParallel sends gradients: "
            "register no hook, or drop reduce_dtype"
        )
    if not wrapper._comm_hooks:
        group = wrapper.process_group
        wrapper.register_comm_hook(None if group is torch.distributed.group.WORLD else group, _average_in_float32)


def _average_in_float32(group: Any, bucket: Any) -> Any:
    buffer, group = bucket.buffer(), group or torch.distributed.group.WORLD
    mean = buffer.float().div_(group.size())
    work: Any = torch.distributed.all_reduce(mean, group=group, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


# torch accepts its own types as annotations or none, and not their names.
_average_in_float32.__annotations__.clear()


@torch.no_grad()
def broadcast(values: Sequence[Callable[[], torch.Tensor]], src: int, group: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Send float32 numbers from one rank to all others, a few at a time.

    Yields:
        On the ranks that receive: the place in ``values``, and what it is on ``src``; a tensor of its own. On
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


class FinalSync:
    """A DistributedDataParallel's ``_sync_final_model``, with which ``join()`` ends, and a method called after it."""

    def __init__(self, wrapper: Any, afterwards: Callable[[Any, int], None]) -> None:
        self._wrapper = wrapper
        self._afterwards: Any = weakref.WeakMethod(afterwards)

    def __call__(self, is_last_joiner: bool) -> None:
        """Let torch broadcast the 16-bit weights, then call the method."""
        type(self._wrapper)._sync_final_model(self._wrapper, is_last_joiner)
        afterwards = None if self._afterwards is None else self._afterwards()
        if afterwards is not None:
            afterwards(self._wrapper, self._wrapper._authoritative_rank)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the wrapper is no part of any session.
        return {"_wrapper": self._wrapper, "_afterwards": None}


def after_join(wrapper: Any, afterwards: Callable[[Any, int], None]) -> None:
    """Call a method whenever a DistributedDataParallel's ``join()`` has made all ranks' weights one."""
    wrapper._sync_final_model = FinalSync(wrapper, afterwards)


def remove_after_join(wrapper: Any) -> None:
    """Reverse :func:`after_join`."""
    if isinstance(vars(wrapper).get("_sync_final_model"), FinalSync):
        del wrapper._sync_final_model


def refuse_training(wrapper: Any) -> None:
    """Refuse to train with a DistributedDataParallel whose parameters have another dtype than it was made for.

    torch silently drops its hooks then, and no gradient is reduced. Evaluation still works.
    """
    wrapper.register_forward_pre_hook(_check_is_evaluated)


def _check_is_evaluated(wrapper: nn.Module, args: Any) -> None:
    if torch.is_grad_enabled() and wrapper.training:
        name = type(wrapper).__name__
        raise RuntimeError(
            f"this {name} was made around 16-bit weights, which mpinit.undo has given their float32 back: it would "
            f"not reduce gradients over ranks any more. Wrap the model again, model = {name}(model), or evaluate "
            "with it under torch.no_grad()"
        )
