"""SyncBatchNorm, its conversion and its process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm with apex's arguments, which also trains on the CPU.

    Args:
        num_features, eps, momentum, affine, track_running_stats, process_group: as in ``torch.nn.SyncBatchNorm``.
        channel_last: accepted; torch reads the memory format from the input.
        fuse_relu: apply a ReLU to the output.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise ``input``, add ``z`` where it is given, and apply the ReLU where it was asked for."""
        output = self._normalise_on_cpu(input) if self._needs_cpu_path(input) else super().forward(input)
        if z is not None:
            output = output + z
        return torch.relu(output) if self.fuse_relu else output

    def _needs_cpu_path(self, input: Tensor) -> bool:
        """torch's own kernel refuses CPU tensors as soon as there are several processes."""
        uses_batch = self.training or self.running_mean is None
        return input.device.type == "cpu" and uses_batch and dist.is_available() and dist.is_initialized()

    def _normalise_on_cpu(self, input: Tensor) -> Tensor:
        """Statistics summed over the group by a differentiable all_reduce."""
        x = input.float()
        axes = [axis for axis in range(x.dim()) if axis != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        count = x.new_full((1,), x.numel() / x.size(1))
        sums = torch.cat([x.sum(axes), count])
        mean_sum, total = torch.split(_all_reduced(sums, self.process_group), [x.size(1), 1])
        mean = mean_sum / total
        centred = x - mean.view(shape)
        variance = _all_reduced(centred.square().sum(axes), self.process_group) / total
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach() * (total / (total - 1)))
        output = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.float().view(shape) + self.bias.float().view(shape)
        result: Tensor = output.to(input.dtype)
        return result

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), share)


class _AllReduced(torch.autograd.Function):
    """The sum over the processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        summed = tensor.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def _all_reduced(tensor: Tensor, group: Any) -> Tensor:
    summed: Tensor = _AllReduced.apply(tensor, group)  # type: ignore[no-untyped-call]
    return summed


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace every BatchNorm of a model, in place, by a SyncBatchNorm with the same parameters and statistics.

    Args:
        module: a model, or one BatchNorm.
        process_group: the processes that share statistics; None for all.
        channel_last: handed to the new modules.

    Returns:
        The model, or the module that replaces it where it is a BatchNorm itself.

    Example:
        >>> type(convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(2)))[0]).__name__
        'SyncBatchNorm'
    """
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        return _converted(module, process_group, channel_last)
    for name, child in list(module.named_children()):
        replacement = convert_syncbn_model(child, process_group, channel_last)
        if replacement is not child:
            module.add_module(name, replacement)
    return module


def _converted(module: _BatchNorm, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    new = SyncBatchNorm(
        module.num_features,
        module.eps,
        module.momentum,
        module.affine,
        module.track_running_stats,
        process_group,
        channel_last,
    )
    # The same Parameter objects: an optimizer made before the conversion keeps training them.
    new._parameters.update(module._parameters)
    new._buffers.update(module._buffers)
    new.training = module.training
    return new


def create_syncbn_process_group(group_size: int) -> Any:
    """Split the processes into groups of ``group_size`` neighbours that share BatchNorm statistics.

    Args:
        group_size: processes in a group; must divide the number of processes. 0 means all of them.

    Returns:
        This process' group, or None for all processes.

    Raises:
        ValueError: a size that does not divide the number of processes.
    """
    if group_size == 0:
        return None
    world = dist.get_world_size()
    if group_size < 0 or group_size > world or world % group_size:
        raise ValueError(
            f"group_size={group_size} does not divide the {world} processes there are; give a divisor of {world}, or 0"
        )
    own = None
    for first in range(0, world, group_size):
        ranks = list(range(first, first + group_size))
        group = dist.new_group(ranks)  # every process must create every group
        if dist.get_rank() in ranks:
            own = group
    return own
