"""Collectives for the simulated device: gloo, over copies on the host."""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future


class HostedGroup(dist.ProcessGroup):
    """A process group whose tensors may be on the device: each goes to the host, through gloo, and back."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        """What messages call it."""
        return "hosted"

    @property
    def group_name(self) -> str:
        """What torch has called it."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def _through(self, collective: str, into: Any, *given: Any) -> Any:
        """Run a collective on host tensors in the places of ``into``'s, which get what comes out."""
        there = _on_host(into)
        getattr(self._gloo, collective)(there, *map(_on_host, given)).wait()
        _copy(into, there)
        done: Any = torch.futures.Future()
        done.set_result(into)
        return _create_work_from_future(done)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        return self._through("allreduce", tensors, *_given(options))

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        return self._through("broadcast", tensors, *_given(options))

    def allgather(self, into: Any, tensors: Any, options: Any = None) -> Any:
        return self._through("allgather", into, tensors, *_given(options))

    def all_gather_single(self, into: Any, tensor: Any, options: Any = None) -> Any:
        return self._through("_allgather_base", into, tensor, *_given(options))

    def reduce_scatter_single(self, into: Any, tensor: Any, options: Any = None) -> Any:
        return self._through("_reduce_scatter_base", into, tensor, *_given(options))

    def barrier(self, options: Any = None) -> Any:
        return self._gloo.barrier()


def _given(options: Any) -> list[Any]:
    return [] if options is None else [options]


def _on_host(tensors: Any) -> Any:
    if isinstance(tensors, list):
        return [_on_host(each) for each in tensors]
    return tensors.cpu() if isinstance(tensors, torch.Tensor) else tensors


def _copy(into: Any, there: Any) -> None:
    if isinstance(into, torch.Tensor):
        into.copy_(there)
        return
    for target, source in zip(into, there, strict=True):
        if isinstance(target, list):
            _copy(target, source)
        elif target is not source:
            target.copy_(source)


def register() -> None:
    """Make ``hosted`` a backend of ``torch.distributed``."""
    if not hasattr(dist.Backend, "HOSTED"):
        dist.Backend.register_backend("hosted", HostedGroup, devices=["cpu", "sim"])
