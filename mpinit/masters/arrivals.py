"""Gradients of a plain ``backward()`` on masters as soon as it is over, for whoever walks over parameter groups next.

Only where losses are not scaled: what arrives elsewhere is to be unscaled first.
"""

from __future__ import annotations

import contextlib
import weakref
from operator import attrgetter, is_
from typing import Final, TypeGuard, final

import torch

from ..basics.gradients import all_dense
from ..torch_internals.backward_passes import ends_of_passes
from ..torch_internals.columns import grads_of, set_grads
from ..torch_internals.parameter_watching import TENSOR_GRAD, Shown, Watcher
from .pairs import PairTable

_BOTH: Final = (
    "the gradient of a weight's float32 master was replaced, and then backward() added to the weight's: which of the "
    "two counts? Give the weight's gradient (model.parameters()) before a backward pass that is to add to it, or clear "
    "the gradients (optimizer.zero_grad())"
)
_DTYPE_OF: Final = attrgetter("dtype")


class _Columns:
    """Pairs, in columns for what runs after every backward pass."""

    def __init__(self, pairs: PairTable) -> None:
        self.weights = [pair.model_param for pair in pairs]
        self.masters = [pair.master_param for pair in pairs]
        self.ids = list(map(id, self.masters))
        self._dtypes = [master.grad_dtype for master in self.masters]

    def are_as_masters_take_them(self, gradients: list[torch.Tensor | None]) -> TypeGuard[list[torch.Tensor]]:
        """Whether all are there, dense, and of the types that masters take, as they nearly always are."""
        if not all_dense(gradients):
            return False
        return all(
            wanted in {None, dtype} for wanted, dtype in set(zip(self._dtypes, map(_DTYPE_OF, gradients), strict=True))
        )


@final
class Arrivals:
    """Shows masters what backward passes have left on their weights.

    Args:
        watcher: who knows which gradients somebody has assigned.
        pairs: whose.
        scales: whether losses are scaled; what arrives is handed on elsewhere then.
    """

    def __init__(self, watcher: Watcher, pairs: PairTable, scales: bool) -> None:
        self._scales = scales
        self._watcher = watcher
        self._pairs = pairs
        self._columns: _Columns | None = None
        self._listens = False
        self._block: weakref.ref[object] | None = None

    def changed(self) -> None:
        """The table of pairs has got, or lost, some."""
        self._columns = None
        listens = not self._scales and len(self._pairs) > 0
        if listens != self._listens:
            self._listens = listens
            (ends_of_passes.add if listens else ends_of_passes.discard)(self)

    def hold_back(self, block: object) -> None:
        """Leave gradients where they arrive until :meth:`go_on`: whoever asks hands them on together.

        Args:
            block: whose life the wait's is; dropped without having ended, by an interrupt say, it is over.
        """
        self._block = weakref.ref(block)

    def go_on(self, handed_on: int) -> None:
        """Hand on what arrived meanwhile.

        Args:
            handed_on: of how many pairs that has been done.
        """
        self._block = None
        if self._listens and handed_on != len(self._pairs):
            self.backward_ended()

    def stop_waiting(self) -> None:
        """The block has ended otherwise, by an exception say; whoever keeps its traceback keeps the block alive."""
        if self._block is not None:
            # Two gradients that cannot both count are told of when they are asked for: now something else went wrong.
            with contextlib.suppress(RuntimeError):
                self.go_on(0)

    def backward_ended(self) -> None:
        """Gradients may have arrived.

        Raises:
            RuntimeError: somebody has replaced a master's meanwhile, and the two cannot both count.
        """
        if self._block is not None and self._block() is not None:
            return
        if self._columns is None:
            self._columns = _Columns(self._pairs)
        columns, watcher = self._columns, self._watcher
        gradients, shown = grads_of(columns.weights), grads_of(columns.masters)
        if all(map(is_, gradients, shown)):
            return
        if not watcher.assigned and columns.are_as_masters_take_them(gradients):
            set_grads(columns.masters, gradients)
            watcher.arrived.update(zip(columns.ids, gradients, strict=True))
            return
        for master, gradient, mine in zip(columns.masters, gradients, shown, strict=True):
            if gradient is not None and gradient is not mine and gradient.layout is torch.strided:
                self._show(master, gradient, mine)

    def _show(self, master: torch.Tensor, gradient: torch.Tensor, mine: torch.Tensor | None) -> None:
        watcher, wanted = self._watcher, master.grad_dtype
        shown = watcher.arrived.get(id(master))
        if id(master) in watcher.assigned and not watcher.has_arrived_since(master, gradient):
            return  # what was assigned counts, which the next look sees to
        if id(master) in watcher.assigned or (isinstance(shown, Shown) and shown.known(mine) is None):
            raise RuntimeError(_BOTH)
        if wanted is None or gradient.dtype is wanted:
            TENSOR_GRAD.__set__(master, gradient)
            watcher.arrived[id(master)] = gradient
        elif not (isinstance(shown, Shown) and shown.source is gradient and shown.source_version == gradient._version):
            # In another type, so that ranks can exchange it: what autograd adds to stays in theirs.
            shown = watcher.arrived[id(master)] = Shown.of(gradient, wanted)
            TENSOR_GRAD.__set__(master, shown.copy)
