"""DistributedDataParallel with apex's arguments."""

import functools
from typing import Any

from torch import nn

from ....basics.logs import log
from ... import _core


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with apex's arguments.

    As in apex, buffers are broadcast once, not at each forward. Wrap the model after ``amp.initialize``.

    Args:
        module: the model, already on its device.
        message_size: number of elements per bucket. Default 10,000,000.
        delay_allreduce: sets torch's ``find_unused_parameters``, for models whose iterations do not use every
            parameter. Default False.
        allreduce_always_fp32: reduce 16-bit gradients in float32. Default False.
        gradient_average: False is refused, because torch always averages. Default True.
        **ignored: apex's ``shared_param``, ``allreduce_trigger_params``, ``retain_allreduce_buffers``,
            ``num_allreduce_streams``, ``allreduce_communicators``, ``gradient_average_split_factor``,
            ``gradient_predivide_factor`` and ``prof``. torch needs none of them; a line in the log names them once.
    """

    _IGNORED = (
        "shared_param",
        "allreduce_trigger_params",
        "retain_allreduce_buffers",
        "num_allreduce_streams",
        "allreduce_communicators",
        "gradient_average_split_factor",
        "gradient_predivide_factor",
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
        **ignored: Any,
    ) -> None:
        unknown = [name for name in ignored if name not in self._IGNORED]
        if unknown:
            raise TypeError(
                f"DistributedDataParallel has no argument {unknown[0]!r}; it ignores {', '.join(self._IGNORED)}"
            )
        _log_ignored_once(tuple(name for name, value in ignored.items() if value not in (None, False, 1)))
        if not gradient_average:
            raise ValueError(
                "gradient_average=False: torch's DistributedDataParallel averages gradients over processes: omit it, "
                "and multiply the loss by torch.distributed.get_world_size() for their sum"
            )
        element = max((p.element_size() for p in module.parameters()), default=4)
        megabytes = max(message_size * element / 2**20, 1e-3)
        super().__init__(module, bucket_cap_mb=megabytes, find_unused_parameters=delay_allreduce)
        # Set here because torch is renaming the constructor's option.
        self.broadcast_buffers = False
        if allreduce_always_fp32:
            _core.reduce_in_float32(self)

    def disable_allreduce(self) -> None:
        """Stop reducing gradients, from the next forward on."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Reduce gradients again from the next forward on."""
        self.require_backward_grad_sync = True


@functools.cache
def _log_ignored_once(names: tuple[str, ...]) -> None:
    if names:
        log.info(
            "DistributedDataParallel: %s is for apex's engine, and torch's ignores it",
            ", ".join(names),
        )
