"""DistributedDataParallel with apex's arguments."""

import functools
import inspect
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
