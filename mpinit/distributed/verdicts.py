"""The verdict of all ranks: one collective a group, at points that every rank reaches equally often."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .agreement import Group, device_for
from .backward_passes import BackwardPasses, call_in_backward
from .replicas import is_joining


class Verdicts:
    """The verdicts of one session's ranks.

    A verdict is an all-reduce (MAX) of a vector, in ``optimizer.step()`` or at the end of ``scale_loss``. The loop of
    one rank may skip a call of ``step()`` and begin the next forward, where DistributedDataParallel or FSDP2 runs
    collectives, while the other ranks wait in ``step()``. So a rank owes a verdict after each forward whose gradients
    are reduced. If it has not agreed by its next forward, it joins the others' verdict before that forward, without
    numbers of its own.

    If one rank leaves out a backward pass of DistributedDataParallel, its next one is reduced together with the
    present one of the others. Then the verdicts of these passes are one, and the rank exchanges none before.

    Attributes:
        groups: the process groups to reduce over, in the same order on every rank.
        fsdp_groups: FSDP2's groups of parameters, which record whether gradients are reduced.
        passes: the backward passes of sharded models; compared before a verdict, too.
    """

    def __init__(self) -> None:
        self.groups: Sequence[Group] = ()
        self.fsdp_groups: Sequence[Any] = ()
        self.passes = BackwardPasses()
        self._owes_verdict = False
        # Under DistributedDataParallel: whether no backward pass has run since the last forward, and whether one has
        # run since the last verdict with numbers of this rank's own.
        self._lacks_backward = self._has_new_gradients = False

    @property
    def are_without_gradients(self) -> bool:
        """Return whether this rank has no new gradients, because it has left out DistributedDataParallel's pass."""
        return self._lacks_backward and not self._has_new_gradients

    def agree(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over all ranks of the groups; ``vector`` is not changed.

        Raises:
            RuntimeError: this rank has left out a backward pass that others have run.
        """
        self._has_new_gradients = self._owes_verdict = False
        return self.join(vector)

    def join(self, vector: torch.Tensor) -> torch.Tensor:
        """Do the same without numbers of this rank's own gradients, whose verdict is still to come."""
        self.passes.compare()
        agreed = vector.clone()
        for group in self.groups:
            there = agreed.to(device_for(group, agreed.device))
            torch.distributed.all_reduce(there, torch.distributed.ReduceOp.MAX, group=group)
            agreed = there.to(vector.device)
        return agreed

    def postpone(self) -> None:
        """Expect no verdict for the last forward: further passes of the same step follow, on all ranks."""
        self._owes_verdict = False

    def expect(self, module: nn.Module) -> bool:
        """Prepare for a forward, after which a verdict may be owed; return whether one is owed before it."""
        self.passes.before_forward()
        is_owed = self._owes_verdict and not self._lacks_backward
        self._owes_verdict = torch.is_grad_enabled() and self._will_be_reduced(module)
        return is_owed

    def after_forward_of_wrapper(self, output: Any) -> None:
        """Watch for the backward pass of a DistributedDataParallel's forward, if verdicts are exchanged."""
        if self.groups and torch.is_grad_enabled() and call_in_backward(output, self._begin_backward):
            self._lacks_backward = True

    def _begin_backward(self) -> None:
        self._lacks_backward, self._has_new_gradients = False, True

    def _will_be_reduced(self, module: Any) -> bool:
        is_wrapper = isinstance(module, nn.parallel.DistributedDataParallel)
        syncs = not is_wrapper or (module.require_backward_grad_sync and not is_joining(module))
        return syncs and all(group.reduce_grads for group in self.fsdp_groups)

    def were_reduced(self, wrappers: Sequence[Any]) -> bool:
        """Return whether backward passes of the last forwards reduce gradients; the same on all ranks.

        Args:
            wrappers: the DistributedDataParallel wrappers of the models.
        """
        # torch sets it in each forward: False inside of no_sync().
        synced = all(wrapper.require_forward_param_sync for wrapper in wrappers)
        return synced and all(group.reduce_grads for group in self.fsdp_groups)
