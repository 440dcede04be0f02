"""The ranks of the ``process_group`` of ``initialize``: pipeline stages, or replicas that are averaged by hand."""

import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch

from .agreement import Group
from .sharding import is_sharded, local

# process_group -> the ranks in it that train -> the group of these ranks. Each is created once, because torch does not
# delete a group's keys from the store.
_TRAINING: Final[weakref.WeakKeyDictionary[Group, dict[tuple[int, ...], Group]]] = weakref.WeakKeyDictionary()


class Stages:
    """The ranks of the ``process_group`` of ``initialize``, which all do a step or all skip it.

    Attributes:
        group: the process group of those that have an optimizer; None without a ``process_group``, and on a rank
            without an optimizer.
        are_replicas: whether all have parameters with the same values, none of them sharded. Then each computes
            gradients of the whole model, and ranks may run different numbers of ``scale_loss`` blocks in a step.
            Stages of a pipeline run equally many.
        are_without_this_rank: whether there is a ``process_group``, and this rank has no optimizer.
    """

    def __init__(self, group: Group | None) -> None:
        self.group = self._whole = group
        self.are_replicas = False
        self.are_without_this_rank = False

    @property
    def are_named(self) -> bool:
        """Return whether there is a ``process_group``."""
        return self._whole is not None

    def compare(self, parameters: Iterable[torch.Tensor], trains: bool) -> None:
        """Find out which ranks train, and whether they are replicas. All ranks of the group call it.

        Args:
            parameters: of this rank's models.
            trains: whether this rank has an optimizer, or expects one.
        """
        if self._whole is None:
            return
        distributed: Any = torch.distributed
        gathered: list[Any] = [None] * distributed.get_world_size(self._whole)
        distributed.all_gather_object(gathered, (trains, _summary(parameters)), group=self._whole)
        members = distributed.get_process_group_ranks(self._whole)
        training = [rank for rank, (does, _) in zip(members, gathered, strict=True) if does]
        summaries = [summary for does, summary in gathered if does]
        self.are_replicas = all(summary is not None and summary == summaries[0] for summary in summaries)
        self.are_without_this_rank = not trains
        self.group = _subgroup(self._whole, training) if trains else None


def _summary(parameters: Iterable[torch.Tensor]) -> Any:
    """Return shapes and sums of the parameters, which replicas have in common; None if one is sharded."""
    found = []
    for parameter in parameters:
        if is_sharded(parameter):
            return None
        values = local(parameter).detach()
        found.append((tuple(values.shape), None if values.is_meta else float(values.double().abs().sum())))
    return found


def _subgroup(group: Group, ranks: list[int]) -> Group:
    distributed: Any = torch.distributed
    if ranks == distributed.get_process_group_ranks(group):
        return group
    known = _TRAINING.setdefault(group, {})
    if tuple(ranks) not in known:
        # Only these ranks call it. Without local synchronization new_group would wait for all others, too.
        known[tuple(ranks)] = distributed.new_group(ranks, use_local_synchronization=True)
    return known[tuple(ranks)]
