"""The verdict of all ranks: one collective a group, at points that every rank reaches equally often."""

import math
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from ..basics.patching import Undo
from ..torch_internals.running import current_pass, is_eager
from .agreement import Group, device_for
from .backward_passes import BackwardPasses
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
        passes: the backward passes of sharded models; compared before a verdict, too.
    """

    def __init__(self) -> None:
        self.groups: Sequence[Group] = ()
        self.size = 0
        self.fsdp_groups: Sequence[Any] = ()
        self.passes = BackwardPasses()
        self._owes_verdict = False

    def agree(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over all ranks of the groups; ``vector`` is not changed.

        Raises:
            RuntimeError: this rank has left out a backward pass that others have run.
        """
        self.passes.compare()
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

    def follow_forwards(self, module: nn.Module) -> list[Undo]:
        """Call :meth:`before_forward` and ``passes`` in hooks of a module's forward; return functions that remove them.

        All ranks call these forwards equally often. The hooks run before those of FSDP2, which gather parameters in the
        forward, and in the backward pass.
        """
        return [
            module.register_forward_pre_hook(BeforeForward(self), prepend=True).remove,
            module.register_forward_hook(AfterForward(self), prepend=True).remove,
        ]

    def before_forward(self, module: nn.Module) -> None:
        """Join the verdict of the ranks that step, if this rank has not called ``step()`` since its last forward."""
        if not self.groups:
            return
        self.passes.before_forward()
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


class _ForwardHook:
    """A hook of a forward; in a copy of the module it does nothing."""

    def __init__(self, verdicts: Verdicts | None) -> None:
        self._verdicts = None if verdicts is None else weakref.ref(verdicts)

    def verdicts(self) -> Verdicts | None:
        """Return the verdicts; None if torch.compile traces the forward, or a backward pass computes it again."""
        if torch.compiler.is_compiling() or self._verdicts is None or current_pass() != -1 or not is_eager():
            return None
        # DistributedDataParallel around the module has called before_forward already.
        is_inside = nn.parallel.DistributedDataParallel._active_ddp_module is not None
        return None if is_inside else self._verdicts()

    def __reduce__(self) -> Any:
        return type(self), (None,)


class BeforeForward(_ForwardHook):
    """A hook that calls :meth:`Verdicts.before_forward`."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Call it."""
        verdicts = self.verdicts()
        if verdicts is not None:
            verdicts.before_forward(module)


class AfterForward(_ForwardHook):
    """A hook that calls :meth:`BackwardPasses.after_forward`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Call it."""
        verdicts = self.verdicts()
        if verdicts is not None:
            verdicts.passes.after_forward(output)
