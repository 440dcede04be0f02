"""SyncBatchNorm and the conversion to it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist


class SyncBatchNorm(nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` with apex's arguments. Like torch's, it trains only on accelerators.

    Args:
        num_features, eps, momentum, affine, track_running_stats, process_group: as in ``torch.nn.SyncBatchNorm``.
        channel_last: accepted; torch reads the memory format from the input.
        fuse_relu: apply a ReLU to the output.
    """

    fuse_relu = False

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
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise ``input``, add ``z`` unless it is None, and apply the ReLU if ``fuse_relu`` is True."""
        output = super().forward(input)
        if z is not None:
            output = output + z
        return torch.relu(output) if self.fuse_relu else output


def create_syncbn_process_group(group_size: int) -> Any:
    """Split all processes into groups of a size that share BatchNorm statistics, and return this process's own.

    It is the group to pass as ``process_group``; None for a ``group_size`` of 0, which is all processes.
    """
    if group_size == 0:
        return None
    return dist.new_subgroups(group_size)[0]  # type: ignore[no-untyped-call]


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace every BatchNorm of a model, in place, by a SyncBatchNorm with the same parameters and statistics.

    It returns the model, or the new module if the model is a BatchNorm itself.

    Example:
        >>> type(convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(2)))[0]).__name__
        'SyncBatchNorm'
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)  # type: ignore[no-untyped-call]
    for part in converted.modules():
        if type(part) is nn.SyncBatchNorm:
            part.__class__ = SyncBatchNorm  # scripts check it by isinstance
    return converted
