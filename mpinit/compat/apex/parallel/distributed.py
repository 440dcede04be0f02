"""DistributedDataParallel with apex's arguments."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ....amp import float32_allreduce_hook


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
        **ignored: the names of apex in ``_IGNORED``. torch needs none of them.
    """

    _IGNORED = (
        *("shared_param", "allreduce_trigger_params", "retain_allreduce_buffers", "num_allreduce_streams"),
        *("allreduce_communicators", "gradient_average_split_factor", "gradient_predivide_factor", "prof"),
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
            self.register_comm_hook(None, float32_allreduce_hook)

    def disable_allreduce(self) -> None:
        """Stop reducing gradients, from the next forward on."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Reduce gradients again from the next forward on."""
        self.require_backward_grad_sync = True


class Reducer:
    """Averages the gradients of a module, or the values of some tensors, over all processes when it is called.

    A module's parameters are broadcast from rank 0 at construction. Nothing is reduced by itself in a backward pass.

    Args:
        module_or_grads_list: a module, or an iterable of tensors to average.

    Example:
        >>> reducer = Reducer(model)  # doctest: +SKIP
        >>> loss.backward(); reducer.reduce(); optimizer.step()  # doctest: +SKIP
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[torch.Tensor]) -> None:
        self.grads, self.module = [], None
        if not isinstance(module_or_grads_list, nn.Module):
            self.grads = list(module_or_grads_list)
            return
        self.module = module_or_grads_list
        with torch.no_grad():
            for parameter in self.module.parameters():
                values = parameter.detach().clone()
                dist.broadcast(values, 0)
                parameter.copy_(values)  # a write that is counted, so that float32 masters follow

    @torch.no_grad()
    def reduce(self) -> None:
        """Average over all processes; a parameter without a gradient is left out, on every rank alike."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        for grad in grads:
            dist.all_reduce(grad)
            grad.div_(dist.get_world_size())
