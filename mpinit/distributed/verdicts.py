"""The verdict of all ranks: one collective a group, at places that every rank passes equally often."""

import math
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from ..basics.patching import Undo
from .agreement import Group, device_for
from .replicas import is_joining

# The largest of this and a number is the number: of a rank that takes part in a verdict, and has nothing to add.
_NEUTRAL: Final = -math.inf


class Verdicts:
    """The verdicts of one session's ranks.

    Every verdict is a vector, of which the largest numbers over all ranks are reduced. A rank may leave a step out, and
    go on to its next forward, where its engine gathers parameters or reduces buffers with the others, which wait for it
    in ``optimizer.step()``. So a forward whose gradients are reduced owes a verdict, and a rank that has had none by
    the next forward takes part in that of the others there, without a number of its own.

    Attributes:
        groups: the process groups to reduce over, in the same order on every rank.
        size: the length of the vector.
        fsdp_groups: FSDP2's groups of parameters, which say whether gradients are reduced.
    """

    def __init__(self) -> None:
        self.groups: Sequence[Group] = ()
        self.size = 0
        self.fsdp_groups: Sequence[Any] = ()
        self._owes_one = False

    def agree(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the largest of each number over all ranks of the groups; ``vector`` is not changed."""
        self._owes_one = False
        agreed = vector.clone()
        for group in self.groups:
            there = agreed.to(device_for(group, agreed.device))
            torch.distributed.all_reduce(there, torch.distributed.ReduceOp.MAX, group=group)
            agreed = there.to(vector.device)
        return agreed

    def postpone(self) -> None:
        """Owe no verdict for the last forward: more passes of the same step follow on all ranks."""
        self._owes_one = False

    def follow_forwards(self, module: nn.Module) -> Undo:
        """Take part, before each forward of ``module``, in a verdict that is owed, until the result is called.

        All ranks call these forwards equally often. The hook runs before those of FSDP2, which gather parameters.
        """
        return module.register_forward_pre_hook(BeforeForward(self), prepend=True).remove

    def before_forward(self, module: nn.Module) -> None:
        """Take part in the verdict of ranks that step, where this one has left its step out."""
        if not self.groups:
            return
        if self._owes_one:
            # The device is that of the other ranks' gradients; a model of the meta device has got its memory by now.
            first = next(module.parameters(), None)
            self.agree(torch.full((self.size,), _NEUTRAL, device=None if first is None else first.device))
        self._owes_one = torch.is_grad_enabled() and self._will_be_reduced(module)

    def _will_be_reduced(self, module: Any) -> bool:
        is_wrapper = isinstance(module, nn.parallel.DistributedDataParallel)
        syncs = not is_wrapper or (module.require_backward_grad_sync and not is_joining(module))
        return syncs and all(group.reduce_grads for group in self.fsdp_groups)

    def were_reduced(self, wrappers: Sequence[Any]) -> bool:
        """Return whether the gradients of the last forwards are reduced in their backward passes, on all ranks alike.

        Args:
            wrappers: the DistributedDataParallel wrappers of the models.
        """
        # torch sets it in each forward by whether that was inside of no_sync().
        synced = all(wrapper.require_forward_param_sync for wrapper in wrappers)
        return synced and all(group.reduce_grads for group in self.fsdp_groups)


class BeforeForward:
    """A hook that calls :meth:`Verdicts.before_forward`; a copy of the module is no part of the session."""

    def __init__(self, verdicts: Verdicts | None) -> None:
        self._verdicts = None if verdicts is None else weakref.ref(verdicts)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Call it where no forward is traced."""
        # A DistributedDataParallel around the module has taken part already.
        is_inside = nn.parallel.DistributedDataParallel._active_ddp_module is not None
        if torch.compiler.is_compiling() or is_inside or self._verdicts is None:
            return
        verdicts = self._verdicts()
        if verdicts is not None:
            verdicts.before_forward(module)

    def __reduce__(self) -> Any:
        return BeforeForward, (None,)
