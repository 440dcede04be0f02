"""Distributed helpers under apex's names, over ``torch.distributed``."""

from .distributed import DistributedDataParallel
from .sync_batchnorm import SyncBatchNorm, convert_syncbn_model

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"]
