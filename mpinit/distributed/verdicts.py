"""The verdict of all ranks: one collective a group, at points that every rank reaches equally often."""

import math
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from ..basics.patching import Undo
from .agreement import Group, device_for
from .replicas import is_joining

# The neutral element of MAX, for a rank that joins a verdict without numbers of its own.
_NEUTRAL: Final = -math.inf


class Verdicts:
    """The verdicts of one session's ranks.

    A verdict is an all-reduce (MAX) of a vector, in ``optimizer.step()`` or at the end of ``scale_loss``. The loop of
    one rank may skip a call of ``step()`` and begin the next forward, where DistributedDataParallel or FSDP2 runs
    collectives, while the other ranks wait in ``step()``. So a rank owes a verdict after each forward whose gradients
    are reduced. If it has not agreed by its next forward, it joins the others' verdict before that forward, without
    numbers of its own.

    Attributes:
        groups: the process groups to reduce over, in the same order on every rank.
        size: the length of the vector.
        fsdp_groups: FSDP2's groups of parameters, which record whether gradients are reduced.
    """

    def __init__(self) -> None:
        self.groups: Sequence[Group] = ()
        self.size = 0
        self.fsdp_groups: Sequence[Any] = ()
        self._owes_verdict = False

    def agree(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over all ranks of the groups; ``vector`` is not changed."""
        self._owes_verdict = False
        agreed = vector.clone()
        for group in self.groups:
            there = agreed.to(device_for(group, agreed.device))
            torch.distributed.all_reduce(there, torch.distributed.ReduceOp.MAX, group=group)
            agreed = there.to(vector.device)
        return agreed

    def postpone(self) -> None:
        """Expect no verdict for the last forward: further passes of the same step follow, on all ranks."""
        self._owes_verdict = False

    def follow_forwards(self, module: nn.Module) -> Undo:
        """Call :meth:`before_forward` in a forward pre-hook of ``module``; return the function that removes the hook.

        All ranks call these forwards equally often. The hook runs before those of FSDP2, which gather parameters.
        """
        return module.register_forward_pre_hook(BeforeForward(self), prepend=True).remove

    def before_forward(self, module: nn.Module) -> None:
        """Join the verdict of the ranks that step, if this rank has not called ``step()`` since its last forward."""
        if not self.groups:
            return
        if self._owes_verdict:
            # The device is that of the other ranks' gradients; a meta model was materialised before its first forward.
            first = next(module.parameters(), None)
            self.agree(torch.full((self.size,), _NEUTRAL, device=None if first is None else first.device))
        self._owes_verdict = torch.is_grad_enabled() and self._will_be_reduced(module)

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


class BeforeForward:
    """A hook that calls :meth:`Verdicts.before_forward`; in a copy of the module it does nothing."""

    def __init__(self, verdicts: Verdicts | None) -> None:
        self._verdicts = None if verdicts is None else weakref.ref(verdicts)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Call it unless torch.compile traces the forward."""
        # DistributedDataParallel around the module has called it already.
        is_inside = nn.parallel.DistributedDataParallel._active_ddp_module is not None
        if torch.compiler.is_compiling() or is_inside or self._verdicts is None:
            return
        verdicts = self._verdicts()
        if verdicts is not None:
            verdicts.before_forward(module)

    def __reduce__(self) -> Any:
        return BeforeForward, (None,)
