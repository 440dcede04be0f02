"""Gradients of a plain ``backward()`` on masters as soon as they arrive, for whoever walks over parameter groups next.

Only where losses are not scaled: what arrives elsewhere is to be unscaled first.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, final

import torch
from torch.utils.hooks import RemovableHandle

from ..torch_internals.backward_passes import at_the_very_end, current_pass
from ..torch_internals.parameter_watching import TENSOR_GRAD, Shown, Watcher
from .pairs import Pair, PairTable

_BOTH: Final = (
    "the gradient of a weight's float32 master was replaced, and then backward() added to the weight's: which of the "
    "two counts? Give the weight's gradient (model.parameters()) before a backward pass that is to add to it, or clear "
    "the gradients (optimizer.zero_grad())"
)


@final
class Arrivals:
    """Hooks on weights that hand what autograd has accumulated to their masters.

    Args:
        watcher: who knows which gradients somebody has assigned.
        pairs: those whose gradients are not yet what they are going to be when they arrive are among them.
    """

    def __init__(self, watcher: Watcher, pairs: PairTable) -> None:
        self._watcher = watcher
        self._pairs = pairs
        self._handles: dict[int, RemovableHandle] = {}
        self._pass = -1

    def follow(self, pair: Pair) -> None:
        """From here on the pair's master shows what arrives on its weight."""
        # A weight holds its hooks, and the garbage collector does not see that: a hook holds nothing.
        hook = _Hook(weakref.ref(self), weakref.ref(pair.master_param))
        weight: Any = pair.model_param
        self._handles[id(weight)] = weight.register_post_accumulate_grad_hook(hook)

    def forget(self, pair: Pair) -> None:
        """No more; harmless where it never did."""
        handle = self._handles.pop(id(pair.model_param), None)
        if handle is not None:
            handle.remove()

    def hand_on(self, weight: torch.Tensor, master: torch.Tensor) -> None:
        """A gradient has arrived on ``weight``.

        Raises:
            RuntimeError: somebody has replaced the master's meanwhile, and the two cannot both count.
        """
        gradient = weight.grad
        if gradient is None or master.grad is gradient:
            return
        watcher = self._watcher
        if watcher.assigned and id(master) in watcher.assigned:
            raise RuntimeError(_BOTH)
        wanted = master.grad_dtype
        if (wanted is None or gradient.dtype is wanted) and gradient.layout is torch.strided:
            TENSOR_GRAD.__set__(master, gradient)
            watcher.arrived[id(master)] = gradient
        elif self._pass != current_pass() and gradient.layout is torch.strided:
            # In another type, so that ranks can exchange it: it is the mean when the pass is over.
            self._pass = current_pass()
            at_the_very_end(self._show_all)

    def _show_all(self) -> None:
        """Show masters copies in their own type; what autograd adds to stays in the ranks'."""
        arrived = self._watcher.arrived
        for pair in self._pairs:
            weight, master = pair.model_param, pair.master_param
            gradient, mine = TENSOR_GRAD.__get__(weight), TENSOR_GRAD.__get__(master)
            wanted = master.grad_dtype
            if gradient is None or gradient is mine or wanted is None or gradient.layout is not torch.strided:
                continue
            shown = arrived.get(id(master))
            if id(master) in self._watcher.assigned or (isinstance(shown, Shown) and shown.known(mine) is None):
                raise RuntimeError(_BOTH)
            if gradient.dtype is not wanted and not (
                isinstance(shown, Shown) and shown.source is gradient and shown.source_version == gradient._version
            ):
                shown = arrived[id(master)] = Shown.of(gradient, wanted)
                TENSOR_GRAD.__set__(master, shown.copy)


class _Hook:
    """:meth:`Arrivals.hand_on` for one weight; an object, because copies and pickles of a closure fail."""

    __slots__ = ("_arrivals", "_master")

    def __init__(self, arrivals: weakref.ref[Arrivals], master: weakref.ref[torch.Tensor]) -> None:
        self._arrivals = arrivals
        self._master = master

    def __call__(self, weight: torch.Tensor) -> None:
        arrivals, master = self._arrivals(), self._master()
        if arrivals is not None and master is not None:
            arrivals.hand_on(weight, master)
