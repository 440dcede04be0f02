"""Full masters: for each 16-bit weight a float32 parameter that the optimizer steps in its place.

Outside of a backward pass ``model_param.grad`` and ``master_param.grad`` are one and the same float32 tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.dtypes import cast_within_range, is_lower_precision
from ..basics.gradients import all_dense, are_plain, as_float32
from ..distributed.exchange import arriving_gradient_dtype
from ..distributed.sharding import is_distributed, local, locals_of, set_data
from ..torch_internals.parameter_watching import TENSOR_DATA, TENSOR_DETACH
from .pairs import Pair, give_gradient
from .per_parameter import check_steps_its_groups
from .store import Gradients, MasterStore
from .two_copies import TwoCopies


@final
class FullPair(Pair):
    """A weight and a float32 tensor of its own beside it: 4 bytes a parameter and the weight's 2.

    Example:
        >>> pair = FullPair(nn.Parameter(torch.tensor([1.0001])))
        >>> pair.cast(torch.bfloat16)
        >>> pair.model_param.dtype, pair.values()
        (torch.bfloat16, tensor([1.0001]))
    """

    __slots__ = ("_before",)

    def __init__(self, weight: nn.Parameter) -> None:
        self._before: torch.Tensor | None = None
        # Not detach(): that would share the weight's version, and a change of one would look like one of the other.
        super().__init__(weight, nn.Parameter(TENSOR_DATA.__get__(weight).to(torch.float32), weight.requires_grad))

    @property
    def readable_param(self) -> nn.Parameter:
        """The master."""
        return self.master_param

    def cast(self, dtype: torch.dtype, clamps: bool = False) -> None:
        """Cast the weight; the master holds the old storage."""
        values = TENSOR_DATA.__get__(self.model_param)
        self.clamps = clamps
        set_data(self.model_param, cast_within_range(values, dtype) if clamps else values.to(dtype))

    def values(self) -> torch.Tensor:
        """The master, without its graph."""
        values: torch.Tensor = TENSOR_DETACH(self.master_param)
        return values

    @torch.no_grad()
    def load(self, values: torch.Tensor) -> None:
        """Copy to the master, and round into the weight."""
        self.master_param.copy_(values)
        self.follow_master()
        self.clamp()

    @torch.no_grad()
    def follow_weight(self) -> None:
        """Elements that are their master's rounding, or were, have the master's bits."""
        weight, master = self.model_param, self.master_param
        before = self._before
        if before is None:
            self._before = TENSOR_DETACH(master).clone()
        values = weight.float()
        for known in (before, master) if before is not None else (master,):
            values = torch.where(_is_rounding(weight, known), known, values)
        master.copy_(values)

    def forget_before(self) -> None:
        """Let go of the copy."""
        self._before = None

    @torch.no_grad()
    def follow_master(self) -> None:
        """Round the master into the weight."""
        weight, master = self.model_param, self.master_param
        weight.copy_(cast_within_range(master, weight.dtype) if self.clamps else master)

    @torch.no_grad()
    def clamp(self) -> bool:
        """Only float16 is too narrow."""
        weight, master = local(self.model_param), local(self.master_param)
        if self.clamps or weight.dtype != torch.float16 or not bool((weight.isinf() & master.isfinite()).any()):
            return False
        self.clamps = True
        self.follow_master()
        return True

    @torch.no_grad()
    def agree(self) -> bool:
        """Whether every element of the weight is its master's rounding."""
        return bool(_is_rounding(local(self.model_param), local(self.master_param)).all())

    def restore(self, dtype: torch.dtype) -> None:
        """The master's bits."""
        weight, gradient = self.model_param, self.master_param.grad
        if weight.dtype != dtype:
            weight.grad = None
            # torch has no way back to "the tensor's own dtype"; None takes any.
            weight.grad_dtype = None
            set_data(weight, TENSOR_DATA.__get__(self.master_param).to(dtype))
        give_gradient(weight, gradient)

    def follow_device(self) -> None:
        """Move the master."""
        if self.master_param.device != self.model_param.device:
            self._before = None
            set_data(self.master_param, TENSOR_DATA.__get__(self.master_param).to(self.model_param.device))

    def let_go(self) -> None:
        """Gradients are of the weight's own type from here on."""
        weight, gradient = self.model_param, self.model_param.grad
        weight.grad = None
        # torch has no way back to "the tensor's own dtype"; None takes any.
        weight.grad_dtype = None
        give_gradient(weight, gradient)


def _is_rounding(weight: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    rounded = master.to(weight.dtype)
    same = (rounded == weight) | (rounded.isnan() & weight.isnan())
    if weight.dtype == torch.float16:
        same |= cast_within_range(master, weight.dtype) == weight
    return same


@final
class FullMasters(MasterStore):
    """The store of ``master_weights=True``."""

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """They must step the parameters in their groups.

        Raises:
            ValueError: one of them steps a copy that it made of them.
        """
        for optimizer in optimizers:
            check_steps_its_groups(optimizer)

    def make(self, weight: nn.Parameter, dtype: torch.dtype) -> Pair | None:
        """A float32 master for a 16-bit weight."""
        if not is_lower_precision(dtype):
            return None
        pair = FullPair(weight)
        gradient = weight.grad
        if gradient is not None:
            weight.grad = None
            pair.master_param.grad = as_float32(gradient)
        return pair

    def finish(self, pairs: Sequence[Pair]) -> None:
        """Let autograd add up float32 gradients on the weights."""
        arriving = arriving_gradient_dtype()
        for pair in pairs:
            weight, gradient = pair.model_param, pair.master_param.grad
            if weight.grad is not None:
                weight.grad = None
            weight.grad_dtype = arriving
            if gradient is not None:
                weight.grad = gradient

    def as_held(self, gradients: Gradients) -> Gradients:
        """Float32, sparse ones coalesced."""
        return [None if gradient is None else as_float32(gradient) for gradient in gradients]

    def are_plain(self, copies: TwoCopies, gradients: Gradients, device: torch.device) -> bool:
        """On one device, a weight whose ``grad_dtype`` is float32 takes float32 gradients on it and no others."""
        if copies.device != device or not self.adds_up_natively():
            return are_plain(gradients, device)
        return all_dense(gradients)

    @property
    def steps_in_parts(self) -> bool:
        """False: all masters at once."""
        return False

    def adds_up_natively(self) -> bool:
        """Whether weights take float32 gradients; follows a process group set up after the masters were made."""
        first = self.pairs.first()
        if first is None or first.model_param.grad_dtype is None:
            return first is None
        if arriving_gradient_dtype() is not None:
            return True
        for pair in self.pairs:
            pair.model_param.grad_dtype = None
        return False

    @contextmanager
    def stepping(
        self, optimizer: Optimizer, copies: TwoCopies, rounds_itself: bool = False
    ) -> Iterator[Iterator[None]]:
        """One step on all masters, which are then rounded into the weights, in one call."""
        failed = True
        try:
            with self.watcher:
                yield iter((None,))
            failed = False
        finally:
            if failed or not rounds_itself:
                round_into_weights(copies)
            # The copy is one version more for each weight. Where the step inside wrote to weights too, they are taken
            # for written to from outside next time, and found to be their masters' rounding.
            copies.note_all(copied_once=not (failed or rounds_itself or copies.clamped or is_distributed()))

    def step_with_closure(
        self, optimizer: Optimizer, copies: TwoCopies, step: Callable[[Callable[[], Any] | None], Any], closure: Any
    ) -> Any:
        """The optimizer evaluates the closure itself, as often as it likes, on weights that are their masters."""

        def evaluate() -> Any:
            round_into_weights(copies)
            copies.note_all()
            with self.watcher.listening():
                loss = closure()
            copies.look_at_weights()
            return loss

        with self.watcher:
            result = step(evaluate)
        round_into_weights(copies)
        copies.note_all()
        return result


@torch.no_grad()
def round_into_weights(copies: TwoCopies) -> None:
    """Round every master into its weight, in one call."""
    if copies.pairs:
        torch._foreach_copy_(locals_of(copies.weights), locals_of(copies.masters))
    for pair in copies.clamped:
        pair.follow_master()
