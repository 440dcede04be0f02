"""Float32 masters: for each 16-bit weight a float32 parameter that the optimizer steps in its place.

A store keeps the pairs. Outside of a backward pass ``model_param.grad`` and ``master_param.grad`` are one and the same
float32 tensor, so that whoever looks at, clips or clears the one has done it to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

from ..basics.dtypes import is_lower_precision
from ..basics.gradients import all_dense, are_plain, as_float32
from ..distributed.sharding import is_distributed, locals_of, set_data
from ..torch_internals.allocator import highest, large_on_cpu
from ..torch_internals.data_watching import TENSOR_DATA, Watcher


@dataclass(slots=True)
class Pair:
    """A 16-bit weight and the float32 parameter that stands for it in the optimizer."""

    model_param: nn.Parameter
    master_param: nn.Parameter
    came_in: torch.dtype = torch.float32
    index: int = -1


class FullMasters:
    """Masters kept as float32 tensors of their own: 4 bytes a parameter beside the weight's 2.

    Example:
        >>> store = FullMasters()
        >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> store.add(weight).dtype
        torch.float32
    """

    def __init__(self, watcher: Watcher | None = None) -> None:
        self.pairs: list[Pair] = []
        self._by_weight: dict[int, Pair] = {}
        self._by_master: dict[int, Pair] = {}
        # The pairs' columns, for the loops that every step runs.
        self._weights: list[torch.Tensor] = []
        self._masters: list[torch.Tensor] = []
        self._linked: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._master_versions: list[int] = []
        self._large: list[int] | None = None
        self._device: torch.device | None = None
        self._highest: torch.Tensor | None = None
        self._watcher = watcher or Watcher()
        self._settled = False

    def pair_of(self, parameter: torch.Tensor) -> Pair | None:
        """The pair ``parameter`` belongs to, as its weight or as its master."""
        return self._by_weight.get(id(parameter)) or self._by_master.get(id(parameter))

    def add(self, weight: nn.Parameter) -> nn.Parameter:
        """Make a master of ``weight``, with its gradient so far.

        A float32 weight hands its storage over without a copy: it is about to be cast, and gets new storage then.
        """
        pair = Pair(weight, self._make_master(weight), came_in=weight.dtype)
        gradient, weight.grad = weight.grad, None
        self._by_weight[id(weight)] = self._by_master[id(pair.master_param)] = pair
        pair.index = len(self.pairs)
        self.pairs.append(pair)
        self._weights.append(weight)
        self._masters.append(pair.master_param)
        self._versions.append(weight._version)
        self._master_versions.append(pair.master_param._version)
        self._linked.append(None)
        self._large = None
        self._watcher.watch(weight)
        self.gradient_holder(pair).grad = None if gradient is None else self.gradient_for(pair, gradient)
        if self._settled:
            self._settle(pair)
        return pair.master_param

    def settle(self) -> None:
        """Set-up is over and weights are 16-bit: split or link what had to wait for that."""
        for pair in self.pairs:
            self._settle(pair)
        self._settled = True

    def _settle(self, pair: Pair) -> None:
        self.set_gradient_dtype(pair.model_param)
        self.put_gradient(pair, self.gradient_holder(pair).grad)
        self.note_version(pair)

    def cast_weight(self, pair: Pair, dtype: torch.dtype) -> None:
        """Cast the weight; the master holds the old storage."""
        set_data(pair.model_param, pair.model_param.detach().to(dtype))

    def gradient_for(self, pair: Pair, gradient: torch.Tensor) -> torch.Tensor:
        """``gradient`` in the dtype its holder takes."""
        return as_float32(gradient)

    def _make_master(self, weight: nn.Parameter) -> nn.Parameter:
        # Not detach(): that would share the weight's version, and a change of one would look like one of the other.
        return nn.Parameter(TENSOR_DATA.__get__(weight).to(torch.float32), requires_grad=True)

    def set_gradient_dtype(self, weight: nn.Parameter) -> None:
        """Let autograd accumulate float32 gradients on the weight, or any where the ranks' buckets are 16-bit."""
        weight.grad_dtype = None if is_distributed() else torch.float32

    def check_gradient_dtype(self) -> None:
        """Follow a process group that was set up after the masters were made."""
        if self.pairs and self.pairs[0].model_param.grad_dtype is not None and is_distributed():
            for pair in self.pairs:
                pair.model_param.grad_dtype = None

    def release(self, pair: Pair) -> None:
        """Forget a pair; the weight stays 16-bit and becomes a plain parameter again."""
        del self._by_weight[id(pair.model_param)], self._by_master[id(pair.master_param)]
        index = pair.index
        columns = (self.pairs, self._weights, self._masters, self._linked, self._versions, self._master_versions)
        for column in columns:
            del column[index]
        for later in self.pairs[index:]:
            later.index -= 1
        self._watcher.unwatch(pair.model_param)
        self._large = self._highest = None
        pair.model_param.grad = None
        if pair.model_param.grad_dtype != pair.model_param.dtype:
            # torch has no way back to "the tensor's own dtype"; None takes gradients as autograd makes them.
            pair.model_param.grad_dtype = None

    def remove(self, pair: Pair) -> None:
        """Forget a pair and give the weight its master's float32 bits and gradient."""
        gradient, values = self.gradient_holder(pair).grad, self.values(pair)
        self.release(pair)
        # A 16-bit weight keeps its master's bits, unless the set-up failed: then it is left as it came.
        dtype = torch.float32 if self._settled and is_lower_precision(pair.came_in) else pair.came_in
        set_data(pair.model_param, values.to(dtype))
        pair.model_param.grad = None if gradient is None else gradient.to(dtype)

    # -- gradients ----------------------------------------------------------------------------------------------

    def gradient_holder(self, pair: Pair) -> nn.Parameter:
        """Whose ``.grad`` the next step uses."""
        return pair.master_param

    def held_gradients(self) -> list[torch.Tensor | None]:
        """What was accumulated so far, in the pairs' order.

        A weight whose gradient was cleared behind the master's back (``model.zero_grad()``) has cleared both.
        """
        return self.relink()

    def fresh_gradients(self) -> list[torch.Tensor | None]:
        """What a backward pass has just left on the weights, in the pairs' order."""
        return [weight.grad for weight in self._weights]

    def are_usual(self, gradients: list[torch.Tensor | None], device: torch.device) -> bool:
        """Whether :func:`~mpinit.gradients.are_plain` holds of the pairs' gradients: asked on every step."""
        self._look_at_weights()
        if self._device != device or not self.accumulates_natively:
            return are_plain(gradients, device)
        # Weights on one device whose grad_dtype is float32 take float32 gradients on it and no others.
        return all_dense(gradients)

    def _look_at_weights(self) -> None:
        if self._large is None:
            self._large = large_on_cpu(self._weights)
            devices = {weight.device for weight in self._weights}
            self._device = devices.pop() if len(devices) == 1 else None

    def ready(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients as they are to be put: float32, sparse ones coalesced."""
        return [None if gradient is None else as_float32(gradient) for gradient in gradients]

    def put_gradients(self, gradients: list[torch.Tensor | None], weights_have_them: bool = False) -> None:
        """Give each pair its gradient, float32, in the pairs' order."""
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient
        if not weights_have_them:
            for weight, gradient in zip(self._weights, gradients, strict=True):
                weight.grad = gradient
        self._linked = gradients
        self._keep_highest(gradients)

    def _keep_highest(self, gradients: list[torch.Tensor | None]) -> None:
        self._look_at_weights()
        if self._large:
            # Gradients cleared leave the last one kept where it is.
            kept = highest(gradients[index] for index in self._large)
            self._highest = self._highest if kept is None else kept

    def put_gradient(self, pair: Pair, gradient: torch.Tensor | None) -> None:
        """Make ``gradient``, float32, the gradient of both."""
        pair.master_param.grad = pair.model_param.grad = self._linked[pair.index] = gradient

    def unlinked(self) -> Iterator[Pair]:
        """The pairs whose weight carries a gradient that its master does not."""
        for pair in self.pairs:
            gradient = pair.model_param.grad
            if gradient is not None and gradient is not pair.master_param.grad:
                yield pair

    @property
    def accumulates_natively(self) -> bool:
        """Whether autograd itself can add float32 gradients onto what a pair holds, when nothing is to be unscaled."""
        return not self.pairs or self.pairs[0].model_param.grad_dtype is torch.float32

    def relink(self) -> list[torch.Tensor | None]:
        """Make each pair's two gradients one again: one cleared or replaced on the weight counts for the master.

        Returns:
            The gradients.
        """
        ours, theirs = [m.grad for m in self._masters], [w.grad for w in self._weights]
        if all(map(is_, ours, theirs)):
            return ours
        for pair, mine, other in zip(self.pairs, ours, theirs, strict=True):
            if other is not mine:
                cleared = other is None and mine is self._linked[pair.index]
                kept = mine if other is None else other
                self.put_gradient(pair, None if cleared or kept is None else as_float32(kept))
        return [master.grad for master in self._masters]

    def drop_cleared(self) -> None:
        """Where only the weight's gradient was cleared (``model.zero_grad()``), clear the master's too."""
        for pair, weight, linked in zip(self.pairs, self._weights, self._linked, strict=True):
            if linked is not None and weight.grad is None and pair.master_param.grad is linked:
                self.put_gradient(pair, None)

    def follow_cleared(self, set_to_none: bool) -> None:
        """After the optimizer's ``zero_grad``: the weights' gradients go the masters' way."""
        self.put_gradients([master.grad for master in self._masters])

    # -- weights ------------------------------------------------------------------------------------------------

    @contextmanager
    def stepping(self, rounds_itself: bool = False) -> Iterator[Iterator[None]]:
        """Around the optimizer's steps: iterate over the inside, one step an iteration.

        Weights follow their masters also where a step fails half way, so that the two agree again.

        Args:
            rounds_itself: the step inside rounds the masters into the weights.
        """
        failed = True
        try:
            yield iter((None,))
            failed = False
        finally:
            if failed or not rounds_itself:
                self.round_into_weights()
            # The copy is one version more for each weight. Where the step inside wrote to weights too, they are taken
            # for written to from outside next time, and found to be their masters' rounding.
            usual = not (failed or rounds_itself or is_distributed())
            self.note_versions([version + 1 for version in self._versions] if usual else None)

    def step_with_closure(self, step: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Run an optimizer's step that evaluates the closure itself."""
        return step(closure, *args, **kwargs)

    @torch.no_grad()
    def copy_back(self) -> None:
        """Round every master into its weight, in one call."""
        self.round_into_weights()
        self.note_versions()

    def follow_masters(self) -> None:
        """Where a master was changed outside of ``step()``, by hand or by an optimizer of two steps, round it again."""
        if [master._version for master in self._masters] != self._master_versions:
            self.copy_back()

    @torch.no_grad()
    def round_into_weights(self) -> None:
        """The copy alone, without taking down that it was ours."""
        if self.pairs:
            torch._foreach_copy_(locals_of(self._weights), locals_of(self._masters))

    def note_versions(self, known: list[int] | None = None) -> None:
        """From here on, a change of a weight is somebody else's.

        Args:
            known: the weights' versions, where they need not be read.
        """
        self._versions = [weight._version for weight in self._weights] if known is None else known
        self._master_versions = [master._version for master in self._masters]
        self._watcher.forget_all()

    def note_version(self, pair: Pair) -> None:
        """:meth:`note_versions` for one pair."""
        self._versions[pair.index] = pair.model_param._version
        self._master_versions[pair.index] = pair.master_param._version
        self._watcher.forget(pair.model_param)

    def adopt_external_writes(self) -> None:
        """Where somebody wrote to a weight since the last copy, the master follows."""
        versions = [weight._version for weight in self._weights]
        if versions == self._versions and not self._watcher.handed_out:
            return
        for pair in self.pairs:
            self.adopt_if_written(pair)

    def adopt_if_written(self, pair: Pair) -> None:
        """:meth:`adopt_external_writes` for one pair."""
        weight = pair.model_param
        if weight._version != self._versions[pair.index] or weight in self._watcher.handed_out:
            self.adopt(pair)
            self.note_version(pair)

    @torch.no_grad()
    def adopt(self, pair: Pair) -> None:
        """Let the weight's elements that changed replace the master's.

        Elements that still are their master's rounding leave the master its lower bits.
        """
        weight, master = pair.model_param, pair.master_param
        differs = master.to(weight.dtype) != weight
        master.copy_(torch.where(differs, weight.float(), master))

    def values(self, pair: Pair) -> torch.Tensor:
        """The master's float32 values, shared, not copied."""
        return pair.master_param.detach()

    @torch.no_grad()
    def load(self, pair: Pair, values: torch.Tensor) -> None:
        """Set master and weight from float32 values of the same shape."""
        pair.master_param.copy_(values)
        pair.model_param.copy_(pair.master_param)
        self.note_version(pair)
