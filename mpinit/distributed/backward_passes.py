"""Backward passes of sharded models, in which all ranks run collectives: a rank that leaves one out is refused.

Without the refusal, the next collectives of such a rank pair with those of the others' backward pass: ranks would wait
for one another until the group's timeout, or train on wrong numbers.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from ..basics.patching import Undo
from ..basics.trees import tensors_in
from .agreement import Group, store_of
from .forward_hooks import ForwardHook

_POLL: Final = 0.01
# How many sessions there were on a group: all ranks of the group call initialize for them in the same order.
_SESSIONS: Final[weakref.WeakKeyDictionary[Group, int]] = weakref.WeakKeyDictionary()
_UNEQUAL: Final = (
    "this rank ({}) has run no backward pass after its last forward, and rank {} has. The backward pass of a sharded "
    "model runs collectives, in which it waits for all ranks. Call backward() on every rank: where a loss does not "
    "count, on loss * 0. Or let all ranks decide together, by an all_reduce of the condition"
)
_MISSING: Final = (
    "this rank ({}) has run no backward pass after its last forward, and waits for rank {}, which has neither run one "
    "nor begun its next forward or step. All ranks of a sharded model call the same forwards and backward passes"
)


class BackwardPasses:
    """The backward passes after the forwards of one session.

    Each rank writes the number of the forward that a backward pass belongs to into the store of each group, which is
    no collective. A rank that has run no backward pass since its last forward reads the others' numbers before it runs
    a further collective. If all ranks have left the pass out, as in an evaluation without ``no_grad``, it continues.

    Attributes:
        groups: the process groups whose ranks are compared; none: nothing is written or compared.
    """

    def __init__(self) -> None:
        self.groups: Sequence[Group] = ()
        # The forwards that have recorded a graph, and those of them since the last backward pass.
        self._forwards = self._pending = 0
        # How many forwards the last two backward passes came after. Where it is 2 again and again, as in a contrastive
        # loss, the second forward needs no comparison.
        self._usual: deque[int] = deque([1, 1], maxlen=2)
        self._compared = 0
        self._keys: dict[Group, str] = {}

    def compare_over(self, groups: Sequence[Group]) -> None:
        """Compare backward passes over the ranks of these groups. All of these ranks call it."""
        self.groups = groups
        for group in groups:
            number = _SESSIONS[group] = _SESSIONS.get(group, 0) + 1
            self._keys[group] = f"mpinit session {number}"

    def follow(self, model: nn.Module) -> Undo:
        """Watch for the backward pass of each forward of a model; return the function that ends that."""
        return model.register_forward_hook(_AfterForward(self), prepend=True).remove

    def before_forward(self) -> None:
        """Compare unless further forwards are usual before a backward pass; see :meth:`compare`."""
        if self._pending >= min(self._usual):
            self.compare()

    def after_forward(self, output: Any) -> None:
        """Watch for the backward pass of a forward."""
        if self.groups and call_in_backward(output, self._begin):
            self._forwards += 1
            self._pending += 1

    def _begin(self) -> None:
        """Write that a backward pass begins, before it runs its first collective."""
        if self._pending:
            self._usual.append(self._pending)
            self._pending = 0
            self._write("backward")

    def compare(self) -> None:
        """Check that all ranks have left out the backward pass, if this rank has; wait for slower ranks.

        Raises:
            RuntimeError: another rank has run it.
        """
        if not self._pending or self._compared == self._forwards:
            return
        self._compared = self._forwards
        self._write("without")
        for group in self.groups:
            self._compare_in(group)

    def _compare_in(self, group: Group) -> None:
        distributed: Any = torch.distributed
        own = distributed.get_rank(group)
        ranks = distributed.get_process_group_ranks(group)
        waiting = [rank for rank in range(len(ranks)) if rank != own]
        store = store_of(group)
        end = time.monotonic() + store.timeout.total_seconds()
        while waiting:
            for rank in waiting:
                if self._read(group, "backward", rank) >= self._forwards:
                    raise RuntimeError(_UNEQUAL.format(ranks[own], ranks[rank]))
            waiting = [rank for rank in waiting if self._read(group, "without", rank) < self._forwards]
            if waiting and time.monotonic() > end:
                raise RuntimeError(_MISSING.format(ranks[own], ranks[waiting[0]]))
            time.sleep(_POLL if waiting else 0.0)

    def _write(self, what: str) -> None:
        for group in self.groups:
            rank = torch.distributed.get_rank(group)
            store_of(group).set(f"{self._keys[group]} {what} {rank}", str(self._forwards))

    def _read(self, group: Group, what: str, rank: int) -> int:
        store, key = store_of(group), f"{self._keys[group]} {what} {rank}"
        # Without the check, get() would wait for the key.
        return int(store.get(key)) if store.check([key]) else 0


class _AfterForward(ForwardHook[BackwardPasses]):
    """A forward hook that calls :meth:`BackwardPasses.after_forward`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Call the method with the output."""
        passes = self.owner()
        if passes is not None:
            passes.after_forward(output)


def call_in_backward(output: Any, function: Callable[[], None]) -> bool:
    """Call a function whenever a backward pass reaches the output of a forward; return whether one can.

    It is called before hooks that are registered later, such as FSDP2's.
    """
    outputs = [leaf for leaf in tensors_in(output) if leaf.requires_grad]

    def hook(gradient: torch.Tensor) -> None:
        function()

    unserializable_hook(hook)  # type: ignore[no-untyped-call]
    for each in outputs:
        each.register_hook(hook)  # type: ignore[no-untyped-call]
    return bool(outputs)
