"""DistributedDataParallel and Reducer with apex's arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....basics.logs import log


def buffers_option(kind: Any) -> str:
    """What a kind of DistributedDataParallel calls its option to broadcast buffers at each forward.

    torch is renaming it. A subclass put in torch's place may take it among ``**kwargs``: then its bases say.
    """
    taken = [name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters]
    return "forward_sync_buffers" if "forward_sync_buffers" in taken else "broadcast_buffers"


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with apex's arguments.

    Buffers are not broadcast at each forward, as in apex. Wrap the model after ``amp.initialize``.

    Args:
        module: the model, on the device it shall run on.
        message_size: elements a bucket should hold before it is reduced.
        delay_allreduce: accepted for models whose parameters do not all take part in each iteration; those are
            looked for at every forward then.
        allreduce_always_fp32: reduce 16-bit gradients in float32.
        gradient_average: divide the summed gradients by the number of processes.
        gradient_predivide_factor: divide by this before the reduction and by the rest after it.
        **ignored: apex's ``shared_param``, ``allreduce_trigger_params``, ``retain_allreduce_buffers``,
            ``num_allreduce_streams``, ``allreduce_communicators``, ``gradient_average_split_factor`` and ``prof``:
            torch's engine needs none of them, and says so once in the log.
    """

    _IGNORED = (
        "shared_param",
        "allreduce_trigger_params",
        "retain_allreduce_buffers",
        "num_allreduce_streams",
        "allreduce_communicators",
        "gradient_average_split_factor",
        "prof",
    )

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        *,
        allreduce_always_fp32: bool = False,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        **ignored: Any,
    ) -> None:
        unknown = [name for name in ignored if name not in self._IGNORED]
        if unknown:
            raise TypeError(f"DistributedDataParallel takes no {unknown[0]!r}; it ignores {', '.join(self._IGNORED)}")
        _log_ignored_once(tuple(name for name, value in ignored.items() if value not in (None, False, 1)))
        megabytes = max(message_size * _element_bytes(module) / 2**20, 1e-3)
        super().__init__(
            module,
            **{buffers_option(nn.parallel.DistributedDataParallel): False},  # type: ignore[arg-type]
            bucket_cap_mb=megabytes,
            find_unused_parameters=delay_allreduce,
        )
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            after = dist.get_world_size() / gradient_predivide_factor if gradient_average else 1.0
            before = gradient_predivide_factor if gradient_average else 1.0
            # A lambda, because torch compares annotations, and ours are strings.
            self.register_comm_hook(
                None, lambda state, bucket: _reduce_bucket(bucket, allreduce_always_fp32, before, after)
            )

    def disable_allreduce(self) -> None:
        """Leave gradients unreduced from the next forward on."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Reduce gradients again from the next forward on."""
        self.require_backward_grad_sync = True


def _element_bytes(module: nn.Module) -> int:
    return max((p.element_size() for p in module.parameters()), default=4)


@functools.cache
def _log_ignored_once(names: tuple[str, ...]) -> None:
    if names:
        log.info(
            "DistributedDataParallel: %s given for apex's engine; torch's has no use for it and goes without",
            ", ".join(names),
        )


def _reduce_bucket(bucket: Any, in_float32: bool, before: float, after: float) -> torch.futures.Future[Tensor]:
    """A gradient bucket summed over the processes with divisions before and after it, in float32 where asked."""
    buffer: Tensor = bucket.buffer()
    summed = buffer.float() if in_float32 else buffer
    if before != 1.0:
        summed = summed.div_(before)
    work = dist.all_reduce(summed, async_op=True)
    assert work is not None

    def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        total = future.value()[0]
        if after != 1.0:
            total.div_(after)
        return buffer.copy_(total) if total is not buffer else buffer

    done: torch.futures.Future[Tensor] = work.get_future().then(finish)
    return done


def flat_dist_call(tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] = ()) -> None:
    """Apply a collective to tensors, in place, as one call for each dtype and device.

    Args:
        tensors: what to communicate.
        call: such as ``torch.distributed.broadcast``; what ``all_reduce`` sums is averaged.
        extra_args: further arguments of ``call``.
    """
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for bucket in buckets.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            call(flat, *(extra_args or ()))
            if call is dist.all_reduce:
                flat.div_(dist.get_world_size())
            for tensor, piece in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
                tensor.copy_(piece.view_as(tensor))


class Reducer:
    """Averages gradients over the processes when ``reduce()`` is called, and not before.

    Parameters of a module are made equal over the processes when the Reducer is created.

    Args:
        module_or_grads_list: a module, or tensors to average.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            flat_dist_call(self.module.parameters(), dist.broadcast, (0,))
        else:
            self.grads = list(module_or_grads_list)

    def reduce(self) -> None:
        """Average the gradients (of a module, those that exist) in place."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat_dist_call(grads, dist.all_reduce)
