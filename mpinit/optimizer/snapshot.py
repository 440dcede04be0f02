"""What a step may have to be taken back to: a closure's optimizer moves weights before it is known to overflow."""

from __future__ import annotations

from typing import final

import torch

from .parameter_groups import ParameterGroups


@final
class Snapshot:
    """The float32 numbers of an optimizer's parameters.

    Args:
        groups: whose.
    """

    def __init__(self, groups: ParameterGroups) -> None:
        self._copies = groups.copies
        self._pairs = [(pair, pair.values().clone()) for pair in groups.copies.pairs]
        self._plain = [(parameter, parameter.detach().clone()) for parameter in groups.plain]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back, on both sides."""
        for parameter, values in self._plain:
            parameter.copy_(values)
        for pair, values in self._pairs:
            pair.load(values)
            self._copies.note_one(pair)
        self._copies.note_all()
