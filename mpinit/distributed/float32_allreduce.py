"""A communication hook that sums 16-bit gradients over ranks in float32."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket, ProcessGroup
else:  # real classes, because register_comm_hook compares the annotations; a torch without distributed has none
    GradBucket = getattr(torch.distributed, "GradBucket", object)
    ProcessGroup = getattr(torch.distributed, "ProcessGroup", object)


def float32_allreduce_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of 16-bit gradients over the ranks in float32, and round the mean once.

    For ``ddp.register_comm_hook(None, mpinit.float32_allreduce_hook)``. It sends twice the bytes of 16-bit gradients
    and needs one float32 bucket more. FSDP2 has ``MixedPrecisionPolicy(reduce_dtype=torch.float32)``.

    Args:
        process_group: the group of the DistributedDataParallel, where it was made with one; None: all ranks.
        bucket: gradients of one dtype, flat.

    Returns:
        A future of the mean, in the bucket's dtype.

    Example:
        >>> import torch, mpinit
        >>> ddp = torch.nn.parallel.DistributedDataParallel(model)  # doctest: +SKIP
        >>> ddp.register_comm_hook(None, mpinit.float32_allreduce_hook)  # doctest: +SKIP
    """
    distributed: Any = torch.distributed
    group = distributed.group.WORLD if process_group is None else process_group
    gradients = bucket.buffer()
    # Divided first, as torch's own hooks do, so that no sum overflows.
    mean = gradients.float().div_(distributed.get_world_size(group))
    work = distributed.all_reduce(mean, group=group, async_op=True)
    rounded: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: gradients.copy_(done.value()[0]))
    return rounded
