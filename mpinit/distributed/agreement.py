"""One overflow verdict for all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from .sharding import is_sharded

Group = Any


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The meshes that tensors are sharded over, each once, small ones first; the same order on all of their ranks."""
    meshes = dict.fromkeys(cast(Any, tensor).device_mesh for tensor in tensors if is_sharded(tensor))
    return sorted(meshes, key=lambda mesh: (mesh.ndim, mesh.size(), mesh.mesh_dim_names or ()))


def groups_of(meshes: Iterable[Any], *more: Group | None) -> list[Group]:
    """The process groups over which a verdict has to be agreed on to be one for all ranks.

    Args:
        meshes: over which parameters are sharded.
        *more: further groups; what lies within one of them needs no round of its own.
    """
    distributed: Any = torch.distributed
    ranks = {id(group): set(distributed.get_process_group_ranks(group)) for group in more if group is not None}
    found: dict[str, Group] = {}
    for mesh in meshes:
        for group in mesh.get_all_groups():
            own = set(distributed.get_process_group_ranks(group))
            if not any(own <= others for others in ranks.values()):
                found[group.group_name] = group
    found |= {group.group_name: group for group in more if group is not None}
    return list(found.values())


def agree(verdicts: torch.Tensor, groups: Iterable[Group]) -> torch.Tensor:
    """The largest of each number over all ranks of the groups; ``verdicts`` is not changed."""
    agreed = verdicts.clone()
    for group in groups:
        there = agreed.to(device_for(group, agreed.device))
        torch.distributed.all_reduce(there, torch.distributed.ReduceOp.MAX, group=group)
        agreed = there.to(verdicts.device)
    return agreed


def device_for(group: Group, preferred: torch.device) -> torch.device:
    """Where a group can communicate: NCCL's cannot on the CPU."""
    types = [device.type for device in getattr(group, "_device_types", ())]
    return preferred if not types or preferred.type in types else torch.device(types[0])


def reach(meshes: Iterable[Any]) -> int:
    """How many ranks a verdict can reach over meshes: the product of their groups' sizes."""
    product = 1
    for group in groups_of(meshes):
        product *= torch.distributed.get_world_size(group)
    return product
