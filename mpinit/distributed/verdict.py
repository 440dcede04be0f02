"""Whether the gradients of any rank overflowed: one all-reduce in each step, as torch's ShardedGradScaler has.

All ranks that train one model call ``optimizer.step()`` equally often. A rank that leaves out a call waits, or lets the
others wait, until the group's timeout, as in any collective of torch.
"""

from collections.abc import Iterable
from typing import Any

import torch

from .sharding import is_sharded

Group = Any


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """List the meshes that tensors are sharded over, small ones first; the same order on all of their ranks."""
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if is_sharded(tensor))  # type: ignore[attr-defined]
    return sorted(meshes, key=lambda mesh: (mesh.ndim, mesh.size(), mesh.mesh_dim_names or ()))


def groups_of(parameters: Iterable[torch.Tensor], process_group: Group | None) -> list[Group]:
    """List the process groups over which ``found_inf`` is reduced in a step, in one order on all ranks.

    Args:
        parameters: all parameters of the models, with a gradient or without.
        process_group: the one of ``initialize``. A group of a mesh whose ranks are all in it is left out.

    Returns:
        The groups. Empty where no gradient differs between ranks, as under DistributedDataParallel.
    """
    distributed: Any = torch.distributed
    whole = set() if process_group is None else set(distributed.get_process_group_ranks(process_group))
    groups = [group for mesh in meshes_of(parameters) for group in mesh.get_all_groups()]
    found = {g.group_name: g for g in groups if not whole.issuperset(distributed.get_process_group_ranks(g))}
    return [*found.values(), *([] if process_group is None else [process_group])]


def reduce_found_inf(found_inf: torch.Tensor, groups: Iterable[Group]) -> torch.Tensor:
    """Return the largest of each number over all ranks of the groups.

    Args:
        found_inf: float32, of any shape that is the same on all ranks: above 0 where gradients contain inf or nan. It
            is not changed.
        groups: from :func:`groups_of`. Without one nothing is sent.
    """
    reduced = found_inf.clone()
    for group in groups:
        there = reduced.to(device_for(group, reduced.device))
        torch.distributed.all_reduce(there, torch.distributed.ReduceOp.MAX, group=group)
        reduced = there.to(found_inf.device)
    return reduced


def device_for(group: Group, preferred: torch.device) -> torch.device:
    """Return a device on which a group can communicate: NCCL cannot on the CPU."""
    types = [device.type for device in getattr(group, "_device_types", ())]
    return preferred if not types or preferred.type in types else torch.device(types[0])
