"""Comparison of settings and of words over ranks, and the process groups to compare over."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

import torch

from .sharding import is_sharded

Group = Any
_NAMED: Final = 5
# Seconds that a rank waits for the others, which have just reduced gradients with it.
_TIMEOUT: Final = 8.0
_POLL: Final = 0.01


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """List the meshes that tensors are sharded over, small ones first; the same order on all of their ranks."""
    meshes = dict.fromkeys(cast(Any, tensor).device_mesh for tensor in tensors if is_sharded(tensor))
    return sorted(meshes, key=lambda mesh: (mesh.ndim, mesh.size(), mesh.mesh_dim_names or ()))


def groups_of(meshes: Iterable[Any], *more: Group | None) -> list[Group]:
    """List the process groups that a verdict has to be reduced over to be the same on all ranks."""
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


def reach_of(groups: Sequence[Group]) -> int:
    """Return how many ranks a number reaches at least that every rank reduces over its groups, one after the other.

    All ranks of the groups have to call it. The groups of a grid reach all of its ranks: after the reduction over rows
    each column has the numbers of all rows. Other groups that overlap do not: over [0, 1] and then [1, 2], no number of
    rank 2 reaches rank 0.
    """
    distributed: Any = torch.distributed
    own = [tuple(distributed.get_process_group_ranks(group)) for group in groups]
    # A rank, and the groups that it still has to reduce over.
    queues = {distributed.get_rank(): own}
    for group in groups:
        gathered: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(gathered, queues, group=group)
        for each in gathered:
            queues |= each
    reached = {rank: {rank} for rank in queues}
    queues = {rank: list(waiting) for rank, waiting in queues.items()}
    while True:
        heads = dict.fromkeys(waiting[0] for waiting in queues.values() if waiting)
        ready = [ranks for ranks in heads if all(queues.get(rank, [])[:1] == [ranks] for rank in ranks)]
        if not ready:
            return min(map(len, reached.values()))
        for ranks in ready:
            together = set().union(*(reached[rank] for rank in ranks))
            for rank in ranks:
                reached[rank] = together
                del queues[rank][0]


def check_same(words: Mapping[str, str], parameters: Mapping[str, str], groups: Iterable[Group]) -> None:
    """Compare settings over all ranks that some groups reach; all of these ranks have to call it.

    Raises:
        ValueError: ranks differ. It is raised on each of them, and names the differences.
    """
    distributed: Any = torch.distributed
    records = {distributed.get_rank(): (dict(words), dict(parameters))}
    for group in groups:
        gathered: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(gathered, records, group=group)
        for each in gathered:
            records |= each
    faults = [*_differences({rank: settings for rank, (settings, _) in records.items()})]
    faults = faults or [*_differences({rank: found for rank, (_, found) in records.items()})]
    if faults:
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise ValueError(
            f"ranks that train one model were initialised differently: {'; '.join(faults[:_NAMED])}{more}. Call "
            "mpinit.initialize with the same model and keywords on every rank"
        )


def _differences(by_rank: Mapping[int, Mapping[str, str]]) -> Iterable[str]:
    for key in dict.fromkeys(key for each in by_rank.values() for key in each):
        first = {by_rank[rank].get(key, "missing"): rank for rank in sorted(by_rank, reverse=True)}
        if len(first) > 1:
            yield f"{key} is " + " and ".join(
                f"{value} on rank {rank}" for value, rank in sorted(first.items(), key=lambda pair: pair[1])
            )


def agree(verdicts: torch.Tensor, groups: Iterable[Group]) -> torch.Tensor:
    """Return the largest of each number over all ranks of the groups; ``verdicts`` is not changed."""
    agreed = verdicts.clone()
    for group in groups:
        there = agreed.to(device_for(group, agreed.device))
        torch.distributed.all_reduce(there, torch.distributed.ReduceOp.MAX, group=group)
        agreed = there.to(verdicts.device)
    return agreed


def store_of(group: Group) -> Any:
    """Return the store of a group, in which ranks read and write keys without a collective."""
    store = group.get_group_store()
    # Groups of backends outside of torch have none of their own; torch keeps it beside them.
    distributed: Any = torch.distributed
    return distributed.distributed_c10d._get_process_group_store(group) if store is None else store


def ranks_agree(words: str, group: Group) -> bool:
    """Return whether every rank of a group passes the same ``words`` within a timeout.

    Ranks compare through the group's store, not by a collective: ranks with other words may never call one.
    """
    store, distributed = store_of(group), torch.distributed
    store.set(f"{words} {distributed.get_rank(group)}", "")
    awaited = [f"{words} {rank}" for rank in range(distributed.get_world_size(group))]
    # Not by wait(): each kind of store raises another error after a timeout, and TCPStore logs warnings, too.
    end = time.monotonic() + _TIMEOUT
    while not store.check(awaited):
        if time.monotonic() > end:
            return False
        time.sleep(_POLL)
    return True


def device_for(group: Group, preferred: torch.device) -> torch.device:
    """Return a device on which a group can communicate: NCCL cannot on the CPU."""
    types = [device.type for device in getattr(group, "_device_types", ())]
    return preferred if not types or preferred.type in types else torch.device(types[0])
