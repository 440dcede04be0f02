"""DistributedDataParallel with apex's arguments."""

import functools
from typing import Any

from torch import nn

from ....basics.logs import log
from ... import _core


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with apex's arguments.

    Buffers are broadcast once and not at each forward, as in apex. Wrap the model after ``amp.initialize``.

    Args:
        module: the model, on the device it shall run on.
        message_size: elements a bucket should hold before it is reduced.
        delay_allreduce: accepted for models whose parameters do not all take part in each iteration; those are
            looked for at every forward then.
        allreduce_always_fp32: reduce 16-bit gradients in float32.
        gradient_average: False is refused: torch's engine averages.
        **ignored: apex's ``shared_param``, ``allreduce_trigger_params``, ``retain_allreduce_buffers``,
            ``num_allreduce_streams``, ``allreduce_communicators``, ``gradient_average_split_factor``,
            ``gradient_predivide_factor`` and ``prof``: torch's engine needs none of them; the log says so once.
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
            raise TypeError(f"DistributedDataParallel takes no {unknown[0]!r}; it ignores {', '.join(self._IGNORED)}")
        _log_ignored_once(tuple(name for name, value in ignored.items() if value not in (None, False, 1)))
        if not gradient_average:
            raise ValueError(
                "gradient_average=False: torch's DistributedDataParallel averages gradients over processes; leave it "
                "out, and multiply the loss by torch.distributed.get_world_size() for their sum"
            )
        element = max((p.element_size() for p in module.parameters()), default=4)
        megabytes = max(message_size * element / 2**20, 1e-3)
        super().__init__(module, bucket_cap_mb=megabytes, find_unused_parameters=delay_allreduce)
        # Not by the constructor's option, which torch is renaming.
        self.broadcast_buffers = False
        if allreduce_always_fp32:
            _core.reduce_in_float32(self)

    def disable_allreduce(self) -> None:
        """Leave gradients unreduced from the next forward on."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Reduce gradients again from the next forward on."""
        self.require_backward_grad_sync = True


@functools.cache
def _log_ignored_once(names: tuple[str, ...]) -> None:
    if names:
        log.info(
            "DistributedDataParallel: %s given for apex's engine; torch's has no use for it and goes without",
            ", ".join(names),
        )
