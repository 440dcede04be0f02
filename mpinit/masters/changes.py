"""Which elements of 16-bit weights have changed: a bit an element, set where a master is rounded into its weight."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import torch

from ..torch_internals.parameter_data import TENSOR_DETACH, forget_all_data, note_data
from .writes import Writes

# The name of a weight, flat int64 places, and what stands there now.
Change = tuple[str, torch.Tensor, torch.Tensor]
_BYTE = 8


@final
class Changes:
    """Follows some weights.

    When a master is rounded, old and new stand beside each other, and what differs is known exactly. What is written
    otherwise, by a load or by hand, is noticed by weight, and all of that weight counts.

    Args:
        weights: name -> 16-bit weight.
        accessed: ids of weights whose ``data`` was read, where masters note that already; None: it is noted here.
        settle: lets the weights be what was written to masters in the user's hands.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], accessed: set[int] | None, settle: Callable[[], None]
    ) -> None:
        self._names = list(weights)
        self._weights: list[torch.Tensor] = list(weights.values())
        self._places = {id(weight): place for place, weight in enumerate(self._weights)}
        self._bits = [self._none(weight) for weight in self._weights]
        self._own = set[int]()
        if accessed is None:
            for weight in self._weights:
                note_data(weight, self._own)
        self._writes = Writes(self._weights, self._own if accessed is None else accessed)
        self._writes.found()  # where they are
        self._writes.note()
        self._settle = settle
        self._left: list[Change] | None = None

    @staticmethod
    def _none(weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros(-(-weight.numel() // _BYTE), dtype=torch.uint8, device=weight.device)

    @torch.no_grad()
    def rounding(self, weights: Sequence[torch.Tensor], rounded: Iterable[torch.Tensor]) -> None:
        """Weights are about to become what their masters round to."""
        self._look()
        for weight, new in zip(weights, rounded, strict=True):
            place = self._places.get(id(weight))
            if place is not None:
                differs = new.view(torch.int16) != TENSOR_DETACH(weight).view(torch.int16)
                self._bits[place] = self._bits[place].to(weight.device).bitwise_or_(_packed(differs))

    def rounded(self) -> None:
        """They have."""
        self._writes.note()

    def _look(self) -> None:
        """Weights that were written since, whatever did it."""
        for place in self._writes.found():
            self._bits[place] = torch.full_like(self._bits[place], 255)
        self._own.clear()

    @torch.no_grad()
    def take(self) -> list[Change]:
        """What has changed since this was last called; at most once each element, whatever happened in between."""
        if self._left is not None:
            left, self._left = self._left, []
            return left
        self._settle()
        self._look()
        taken: list[Change] = []
        for place, (name, weight) in enumerate(zip(self._names, self._weights, strict=True)):
            if bool(self._bits[place].any()):
                where = _places(self._bits[place], weight.numel())
                taken.append((name, where, TENSOR_DETACH(weight).reshape(-1)[where]))
                self._bits[place] = self._none(weight)
        self._writes.note()
        return taken

    def end(self) -> None:
        """The weights are no longer followed, or no longer 16-bit; what was not taken can be taken once more."""
        if self._left is None:
            left = self.take()
            self._left = left
            forget_all_data(self._own)


def _packed(flags: torch.Tensor) -> torch.Tensor:
    flat = flags.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % _BYTE)).view(-1, _BYTE)
    return (padded.to(torch.uint8) << _shifts(flags.device)).sum(1, dtype=torch.uint8)


def _places(packed: torch.Tensor, count: int) -> torch.Tensor:
    return ((packed[:, None] >> _shifts(packed.device)) & 1).reshape(-1)[:count].nonzero().reshape(-1)


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(_BYTE, dtype=torch.uint8, device=device)
