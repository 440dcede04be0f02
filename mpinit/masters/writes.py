"""Which weights were written to since their masters were rounded into them.

torch counts writes to a tensor in its version, but not those through memory that is shared with it: ``data`` of a view,
numpy, a kernel that got an address. Where reading costs no wait for a device, weights are therefore compared by their
bits, too: small ones with a copy, large ones by sums of short runs of 64-bit words, which a write leaves as they are
only where it moves words about within a run. Elsewhere versions count, and reads of ``parameter.data``.
"""

from collections.abc import Sequence
from typing import Final, final

import torch

from ..torch_internals.columns import addresses_of, versions_of
from ..torch_internals.parameter_data import TENSOR_DETACH
from ..torch_internals.running import is_read_freely
from .float_split import flat, is_dense

# Numbers of a weight up to which a copy costs less time than calls of two more kernels.
_SMALL: Final = 1 << 12
# Words that are summed up together, of four numbers each.
_RUN: Final = 127
_WORD: Final = 4


@final
class Writes:
    """Notices writes to some 16-bit weights; ``accessed`` gets the ids of those whose ``data`` was read."""

    def __init__(self, weights: Sequence[torch.Tensor], accessed: set[int]) -> None:
        self._weights = list(weights)
        self._accessed = accessed
        self._addresses: list[int] = []
        self._sums: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._is_noted = False
        self._divide()

    def found(self) -> list[int]:
        """The places of weights that were written to since :meth:`note`, or may have been."""
        addresses = addresses_of(self._weights)
        if addresses != self._addresses:
            self._addresses, self._is_noted = addresses, False
            self._divide()
        if not self._is_noted:
            return list(range(len(self._weights)))
        found = {*self._found_in_copy(), *self._gaps}
        for place, words, known in zip(self._large, self._words, self._sums, strict=True):
            if not torch.equal(_sums(words), known):
                found.add(place)
        if self._counted:
            versions = versions_of([self._weights[place] for place in self._counted])
            for place, version, last in zip(self._counted, versions, self._versions, strict=True):
                if version != last or id(self._weights[place]) in self._accessed:
                    found.add(place)
        return sorted(found)

    def note(self) -> None:
        """The weights are as they are meant to be."""
        if self._bits:
            torch.cat(self._bits, out=self._known[: self._numel])
        self._sums = list(map(_sums, self._words))
        if self._counted:
            self._versions = versions_of([self._weights[place] for place in self._counted])
        self._is_noted = True

    def forget(self) -> None:
        """Any weight may have been written to."""
        self._is_noted = False

    def _divide(self) -> None:
        self._small: list[int] = []
        self._large: list[int] = []
        self._gaps: list[int] = []
        self._counted: list[int] = []
        for place, weight in enumerate(self._weights):
            if not is_read_freely(weight.device):
                self._counted.append(place)
            elif not is_dense(weight):
                self._gaps.append(place)
            else:
                (self._small if weight.numel() <= _SMALL else self._large).append(place)
        self._counted += self._large
        self._bits = [self._bits_of(place) for place in self._small]
        self._sizes = [bits.numel() for bits in self._bits]
        self._numel = sum(self._sizes)
        self._known = torch.zeros(-(-self._numel // _WORD) * _WORD, dtype=torch.int16, device="cpu")
        self._present = torch.zeros_like(self._known)
        self._words = [self._bits_of(place) for place in self._large]

    def _bits_of(self, place: int) -> torch.Tensor:
        return flat(TENSOR_DETACH(self._weights[place])).view(torch.int16)

    def _found_in_copy(self) -> list[int]:
        if not self._bits:
            return []
        torch.cat(self._bits, out=self._present[: self._numel])
        if torch.equal(self._present.view(torch.int64), self._known.view(torch.int64)):
            return []
        both = (each[: self._numel].split_with_sizes(self._sizes) for each in (self._present, self._known))
        return [place for place, now, known in zip(self._small, *both, strict=True) if not torch.equal(now, known)]


def _sums(bits: torch.Tensor) -> torch.Tensor:
    if bits.storage_offset() % _WORD:
        bits = bits.clone()
    words = bits[: bits.numel() // _WORD * _WORD].view(torch.int64)
    runs = words.numel() // _RUN
    rest = bits[runs * _RUN * _WORD :]
    return torch.cat((words[: runs * _RUN].view(runs, _RUN).sum(1), rest.to(torch.int64)))
