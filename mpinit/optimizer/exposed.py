"""Masters that ``master_params`` has given out: until the next step of theirs what is done to them counts."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..distributed.sharding import local
from ..masters.full import FullMasters, Given
from ..masters.law import is_rounding, round_into
from ..torch_internals.parameter_data import note_data
from ..torch_internals.running import is_read_freely
from .members import Members


class ExposedMasters:
    """The masters of one optimizer that are in the user's hands.

    A master's ``grad`` is its weight's. What is written to a master is rounded into its weight, and a gradient that
    was replaced counts, whichever of the two it was replaced on.
    """

    def __init__(self, members: Members) -> None:
        self._members = members

    def _given(self) -> list[Given]:
        """Those of this optimizer's masters; another optimizer may have given them out."""
        table = self._members.table
        if not isinstance(table, FullMasters) or not table.given:
            return []
        return [table.given[id(master)] for master in self._members.masters if id(master) in table.given]

    def give_out(self, weights: Iterable[nn.Parameter] | None = None) -> Iterator[nn.Parameter]:
        """Masters where weights have full ones; the weights themselves elsewhere."""
        members, table = self._members, self._members.table
        members.refresh()
        self.settle()
        asked = list(members.weights if weights is None else weights)
        if not isinstance(table, FullMasters):
            yield from asked
            return
        table.exposed.add(self)
        for master in members.masters:
            if id(master) not in table.given:
                table.values(master)
                table.given[id(master)] = Given(master)
                note_data(master.parameter, table.accessed)
        self.bind()
        yield from map(members.inside, asked)
        self.settle()

    def bind(self) -> None:
        """Let masters be what their weights are: what was done to them in between was done by the optimizer."""
        for given in self._given():
            self._bind(given)

    def _bind(self, given: Given) -> None:
        weight, parameter = given.master.weight, given.master.parameter
        gradient = weight.grad
        if gradient is not None and gradient.dtype is not torch.float32:
            # Under DistributedDataParallel they arrive in the weight's type.
            gradient = weight.grad = self._members.table.held([gradient])[0]
        parameter.grad = gradient
        given.gradient = gradient
        given.version, given.weight_version = parameter._version, weight._version
        here, table = local(weight.detach()), self._members.table
        assert isinstance(table, FullMasters)
        # Elsewhere than on a CPU a copy is kept of those alone whose data may be written to at any time, unseen.
        keeps = is_read_freely(here.device) or id(weight) in table.accessed
        given.before = here.clone() if keeps and not here.is_meta else None

    def settle(self) -> None:
        """Let weights be what was done to their masters.

        Raises:
            RuntimeError: a weight and its master were written to, or got other gradients, and differ.
        """
        for given in self._given():
            self._settle(given)

    @torch.no_grad()
    def _settle(self, given: Given) -> None:
        weight, parameter = given.master.weight, given.master.parameter
        here, there = local(weight.detach()), local(parameter.detach())
        # Without a look at the numbers a master may have been written to at any time, through its data.
        is_written, may_be = weight._version != given.weight_version, True
        if given.before is not None and not is_read_freely(here.device):
            if not (is_written and parameter._version != given.version):
                self._merge(given, here, there)
                is_written = may_be = False
        elif given.before is not None:
            is_written = not torch.equal(here.view(torch.int16), given.before.view(torch.int16))
            may_be = parameter._version != given.version or not bool(is_rounding(given.before, there).all())
        else:
            table = self._members.table
            assert isinstance(table, FullMasters)
            is_written |= id(weight) in table.accessed
            if is_written:
                may_be = parameter._version != given.version or id(parameter) in table.accessed
        if is_written and may_be and not bool(is_rounding(here, there).all()):
            raise RuntimeError(_BOTH.format(self._members.names.of(weight), "written to"))
        if may_be and not is_written:
            if given.before is not None or parameter._version != given.version:
                self._members.table.load(given.master, parameter.detach())
            else:
                # Not known to be written to: as through its data, which torch does not count and nothing waits for.
                with _unsafe_preserve_version_counter(weight):
                    round_into(weight, parameter, given.master.clamps)
        elif is_written:
            self._members.table.values(given.master)
        mine, theirs = parameter.grad, weight.grad
        if mine is not theirs and mine is not given.gradient:
            if given.gradient is None and theirs is not None and mine is not None:
                mine = theirs.add_(mine)  # a loss that reaches both: a penalty on masters, say
            elif theirs is not given.gradient:
                raise RuntimeError(_BOTH.format(self._members.names.of(weight), "given other gradients"))
            weight.grad = mine
        self._bind(given)

    def _merge(self, given: Given, here: torch.Tensor, there: torch.Tensor) -> None:
        """What was written to either counts, number by number, without a wait for their device."""
        assert given.before is not None
        is_written = here.view(torch.int16) != given.before.view(torch.int16)
        there.copy_(torch.where(is_written & ~is_rounding(here, there), here.float(), there))
        with _unsafe_preserve_version_counter(given.master.weight):
            round_into(given.master.weight, given.master.parameter, given.master.clamps)

    def close(self) -> None:
        """A step is about to begin: nothing is done to masters between this and the next time they are given out."""
        self.settle()
        table = self._members.table
        for given in self._given():
            assert isinstance(table, FullMasters)
            given.master.parameter.grad = None
            table.take_back(given)
        table.exposed.discard(self)


_BOTH = (
    "the weight {0!r} and its float32 master of mpinit.master_params() were both {1}, differently: change one of the "
    "two"
)
