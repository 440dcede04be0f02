"""The ranks of the ``process_group`` of ``initialize``: pipeline stages, or replicas that are averaged by hand."""

import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch

from .agreement import Group
from .sharding import is_sharded, local

# The groups of the ranks of another group that train something. Made once: torch leaves their keys in the store.
_TRAINING: Final[weakref.WeakKeyDictionary[Group, dict[tuple[int, ...], Group]]] = weakref.WeakKeyDictionary()


class Stages:
    """The ranks whose steps are one.

    Attributes:
        group: the process group of those among them that have an optimizer; None without any, and on a rank without an
            optimizer.
        are_replicas: whether all of them hold the same numbers, none of them sharded: each computes gradients of the
            whole model, perhaps in more passes than another. Stages end as many ``scale_loss`` blocks as the others.
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
        """Find out which ranks train something, and whether they hold the same; all ranks of the group call it.

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
    """Return what replicas have in common; None where something is sharded."""
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
        # Only these ranks call it.
        known[tuple(ranks)] = distributed.new_group(ranks, use_local_synchronization=True)
    return known[tuple(ranks)]
