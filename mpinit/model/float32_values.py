"""The float32 numbers of a session's 16-bit tensors: those of masters, and those of tensors without one."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..masters.full import FullMasters
from ..masters.masters import Master, Masters
from .casting import TensorCasts
from .written_entries import WrittenEntries


class Float32Values:
    """The float32 numbers of a session's 16-bit tensors.

    Attributes:
        masters: the masters of the weights that are trained.
        casts: the casts of all other tensors, with their float32 values.
        entries: the entries of state dicts that users have.
        narrow: inside a ``float32_weights`` block the id of each float32 tensor -> the 16-bit tensor that it replaces.
    """

    def __init__(self, models: Sequence[nn.Module], masters: Masters) -> None:
        self.masters = masters
        self.casts = TensorCasts({}, ())
        self.entries = WrittenEntries()
        self.narrow: dict[int, torch.Tensor] = {}
        self._models = models

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 values of a 16-bit tensor; changes nothing.

        Returns:
            A tensor that must not be written to; None if the tensor has no other values than its own.
        """
        master = self.masters.of(tensor)
        return self.casts.original_values(tensor) if master is None else self.masters.values(master)

    def load(self, tensor: torch.Tensor, values: torch.Tensor) -> bool:
        """Record float32 values that were loaded into a 16-bit tensor of the same shape.

        Returns:
            Whether the tensor has a master, which has these values now.
        """
        master = self.masters.of(tensor)
        if master is None:
            self.casts.load(tensor, values)
            return False
        self.masters.load(master, values)
        return True

    def before_use(self) -> None:
        """Apply writes, and warn once of writes to entries of state dicts, which reach nothing; at a forward or step.

        Raises:
            RuntimeError: see :meth:`apply_writes`.
        """
        self.apply_writes()
        self.entries.warn_of_writes()

    def apply_writes(self, with_gradients: bool = True) -> None:
        """Round masters that users have written to into their weights.

        Raises:
            RuntimeError: the data of a weight has another dtype or shape, or a weight and its master were both written
                to, differently.
        """
        if self.masters.are_in_model:
            return
        self.masters.check_data()
        if isinstance(self.masters, FullMasters):
            self.masters.round_written()

    def hand_out(self, weights: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """List the full masters of some weights; for a weight without one, the weight itself."""
        asked = list(weights)
        return self.masters.hand_out(asked) if isinstance(self.masters, FullMasters) else asked

    def drop_if_unused(self, masters: Iterable[Master]) -> None:
        """Free the masters of weights that are in no optimizer and in no model any more."""
        unused = [master for master in masters if master.optimizers == 0]
        if unused:
            used = {id(parameter) for model in self._models for parameter in model.parameters()}
            for master in unused:
                if id(master.weight) not in used:
                    self.masters.discard(master)
