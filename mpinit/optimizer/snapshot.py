"""What a step may have to be taken back to: a closure's optimizer moves weights before it is known to overflow."""

from typing import final

import torch

from .members import Members


@final
class Snapshot:
    """The float32 numbers of an optimizer's parameters."""

    def __init__(self, members: Members) -> None:
        self._table = members.table
        self._masters = [(master, members.table.values(master).clone()) for master in members.masters]
        own = {id(master.weight) for master in members.masters}
        self._plain = [(weight, weight.detach().clone()) for weight in members.weights if id(weight) not in own]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back."""
        for parameter, values in self._plain:
            parameter.copy_(values)
        for master, values in self._masters:
            self._table.load(master, values)
