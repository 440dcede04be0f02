"""Full masters: for each 16-bit weight a float32 tensor of its own, 4 bytes per parameter."""

import weakref
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, final

import torch
from torch import nn

from ..basics.bulk import consume
from ..basics.modules import Names, share_attributes
from ..basics.running import without_gradients
from ..distributed.sharding import is_sharded, local, set_data, sharded_as
from ..torch_internals.parameter_data import TENSOR_DATA, TENSOR_DETACH, versions_of
from .law import is_rounding, meaning
from .masters import Master, MasterBatch, Masters

_SEEN: Final = attrgetter("seen")
_GIVEN: Final = attrgetter("given")
_WEIGHT: Final = attrgetter("weight")
_PARAMETER: Final = attrgetter("parameter")
_IS_SHARDED: Final = attrgetter("is_sharded")
_BOTH: Final = (
    "the weight {!r} and its float32 master were both written to, differently, since the last step: write to one of "
    "the two"
)
_ASSIGNED: Final = (
    "the grad of a master of mpinit.master_params() is its weight's, and cannot be assigned: assign it to the weight "
    "(p.grad = ..., p of model.parameters()), clear it by optimizer.zero_grad(), or change it in place "
    "(master.grad.mul_(...))"
)
_IN_LOSS: Final = (
    "a loss contains a master of mpinit.master_params(), whose gradients no step would use: use the weight instead, of "
    "model.parameters()"
)


class MasterParameter(nn.Parameter):
    """A full master as users have it: a parameter over the master's memory, whose ``grad`` is its weight's.

    The optimizer steps another parameter over the same memory, a plain one, as its foreach and fused kernels need.
    Both share a version counter, so each write to this one is seen.
    """

    __slots__ = ("_weight",)
    _weight: nn.Parameter

    def __new__(cls, parameter: torch.Tensor, weight: nn.Parameter) -> "MasterParameter":
        made = torch.Tensor._make_subclass(cls, TENSOR_DETACH(parameter), True)
        made._weight = weight
        share_attributes(weight, made)
        made.register_hook(refuse_in_loss)  # type: ignore[no-untyped-call]
        return made

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the weight, 16-bit or float32."""
        return self._weight.grad

    @grad.setter
    def grad(self, _: object) -> None:
        raise RuntimeError(_ASSIGNED)

    @property
    def data(self) -> torch.Tensor:
        """The numbers; an assignment copies, because the optimizer steps this memory."""
        values: torch.Tensor = TENSOR_DETACH(self)
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        TENSOR_DETACH(self).copy_(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _plain(self) -> nn.Parameter:
        return nn.Parameter(TENSOR_DETACH(self).clone(), self.requires_grad)


def refuse_in_loss(_: torch.Tensor) -> None:
    """Refuse a gradient of a master: the hook of each that users have."""
    raise RuntimeError(_IN_LOSS)


@final
class FullMaster(Master):
    """A weight and its float32 tensor.

    Attributes:
        seen: the version of the weight when it was last the master's rounding.
        given: the version of the master at that time; it counts once users may have masters.
        is_compared: whether the two were compared by value since the master was made.
        handed_out: the master as users have it; None until :meth:`FullMasters.hand_out`.
    """

    __slots__ = ("given", "handed_out", "is_compared", "seen")

    def __init__(self, weight: nn.Parameter, parameter: nn.Parameter) -> None:
        super().__init__(weight, parameter)
        self.seen = 0
        self.given = 0
        self.is_compared = False
        self.handed_out: MasterParameter | None = None

    def follow_device(self) -> None:
        """Move the master to the device of its weight."""
        if self.parameter.device != self.weight.device:
            set_data(self.parameter, TENSOR_DATA.__get__(self.parameter).to(self.weight.device))
        handed_out = self.handed_out
        if handed_out is not None and handed_out.data_ptr() != self.parameter.data_ptr():
            TENSOR_DATA.__set__(handed_out, TENSOR_DATA.__get__(self.parameter))


@final
class FullMasters(Masters):
    """The masters of ``master_weights=True``.

    A weight or a master was written to if its version has moved since the two last agreed. The first step compares all
    by value, because ``torch.distributed.broadcast`` moves no version, and ranks may broadcast their weights by hand.

    Attributes:
        counts_writes: whether writes to masters count, because users may have some.
    """

    steps_in_parts = False

    def __init__(self, names: Names | None = None, grad_dtype: torch.dtype | None = None) -> None:
        super().__init__(names, grad_dtype)
        self.counts_writes = False

    def _make(self, weight: nn.Parameter) -> FullMaster:
        # Not detach(), whose result would share the weight's version counter.
        values: torch.Tensor = TENSOR_DATA.__get__(weight)
        wide = values if values.dtype is torch.float32 else values.to(torch.float32)
        return FullMaster(weight, nn.Parameter(wide, weight.requires_grad))

    def _cast(self, masters: Sequence[Master]) -> None:
        for master in masters:
            set_data(master.weight, TENSOR_DATA.__get__(master.weight).to(master.dtype))
        _see([master for master in masters if isinstance(master, FullMaster)])

    @torch.no_grad()
    def values(self, master: Master) -> torch.Tensor:
        """Return the master's own memory if its weight was not written to; otherwise a tensor computed by the law."""
        assert isinstance(master, FullMaster)
        self.check_data([master])
        master.follow_device()
        parameter: torch.Tensor = TENSOR_DETACH(master.parameter)
        if not _have_both_numbers(master):
            return parameter
        weight_moved, master_moved = self._moved(master)
        if master_moved or (master.is_compared and not weight_moved):
            return parameter
        return sharded_as(meaning(local(master.weight), local(parameter)), master.weight)

    @torch.no_grad()
    def load(self, master: Master, values: torch.Tensor) -> None:
        assert isinstance(master, FullMaster)
        master.follow_device()
        if values is not master.parameter:
            master.parameter.copy_(values)
        master.weight.copy_(master.parameter)
        _see([master])

    def batch(self, masters: Sequence[Master], device: torch.device) -> MasterBatch:
        return _Batch(self, [master for master in masters if isinstance(master, FullMaster)])

    # -- writes of the user's -----------------------------------------------------------------------------------------

    def _follow_writes(self) -> None:
        if not self.counts_writes:
            self.check_data(self)
            return
        masters = [master for master in self if isinstance(master, FullMaster)]
        versions = versions_of(map(_PARAMETER, masters))
        pairs = zip(masters, versions, strict=True) if list(map(_GIVEN, masters)) != versions else ()
        self.follow([master for master, version in pairs if master.given != version])

    @torch.no_grad()
    def follow(self, masters: Sequence[FullMaster], compares: bool = False) -> None:
        """Apply writes to weights and to masters, by the law.

        Args:
            masters: the masters.
            compares: whether to compare, by value, those that never were.

        Raises:
            RuntimeError: a weight and its master were both written to, and differ.
        """
        self.check_data(self)
        weights, parameters = _versions_of(masters)
        moved = [
            master
            for master, weight, parameter in zip(masters, weights, parameters, strict=True)
            if master.seen != weight or (self.counts_writes and master.given != parameter)
        ]
        new = [master for master in masters if not master.is_compared] if compares else []
        for master in {id(each): each for each in (*moved, *new)}.values():
            if not _have_both_numbers(master):
                continue
            master.follow_device()
            _, master_moved = self._moved(master)
            if master_moved:
                master.weight.copy_(master.parameter)
            else:
                values = local(TENSOR_DETACH(master.parameter))
                values.copy_(meaning(local(master.weight), values))
            _see([master])
        for master in new:
            master.is_compared = True

    def _moved(self, master: FullMaster) -> tuple[bool, bool]:
        """Return whether the weight, and whether its master was written to.

        Raises:
            RuntimeError: both were, and they differ.
        """
        (weight,), (parameter,) = _versions_of([master])
        weight_moved, master_moved = weight != master.seen, self.counts_writes and parameter != master.given
        if weight_moved and master_moved and not is_rounding(local(master.weight), local(master.parameter)).all():
            raise RuntimeError(_BOTH.format(self.names.of(master.weight)))
        return weight_moved, master_moved

    # -- masters that users have --------------------------------------------------------------------------------------

    def hand_out(self, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """List the masters of weights as users have them; for a weight without one, or a sharded one, the weight.

        From now on writes to these masters count.
        """
        self.follow([master for master in map(self.of, weights) if isinstance(master, FullMaster)])
        self.count_writes()
        listed: list[nn.Parameter] = []
        for weight in weights:
            master = self.of(weight)
            if not isinstance(master, FullMaster) or master.is_sharded:
                listed.append(weight)
                continue
            if master.handed_out is None:
                master.handed_out = MasterParameter(master.parameter, master.weight)
            listed.append(master.handed_out)
        return listed

    def count_writes(self) -> None:
        """Let writes to masters count from now on, because users may have them."""
        if not self.counts_writes:
            masters = [master for master in self if isinstance(master, FullMaster)]
            for master, version in zip(masters, _versions_of(masters)[1], strict=True):
                master.given = version
            self.counts_writes = True


@final
class _Batch(MasterBatch):
    """All full masters of an optimizer."""

    def __init__(self, owner: FullMasters, masters: Sequence[FullMaster]) -> None:
        self._owner = weakref.proxy(owner)  # which may keep this batch
        self._masters = list(masters)
        self._weights: list[torch.Tensor] = [master.weight for master in masters]
        self._parameters: list[torch.Tensor] = [master.parameter for master in masters]
        self._are_sharded = any(master.is_sharded for master in masters)
        self._are_compared = False
        # The versions of the weights when their masters were read.
        self._versions: list[int] = []

    @without_gradients
    def read(self) -> None:
        owner, masters = self._owner, self._masters
        owner.check_data(owner)
        self._versions = _versions(self._weights, self._are_sharded)
        if (
            not self._are_compared
            or self._versions != list(map(_SEEN, masters))
            or (owner.counts_writes and _versions(self._parameters, self._are_sharded) != list(map(_GIVEN, masters)))
        ):
            owner.follow(masters, compares=True)
            self._are_compared, self._versions = True, _versions(self._weights, self._are_sharded)

    def widened(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return gradients  # those of weights with full masters are float32 by now

    @without_gradients
    def write(self) -> None:
        if self._are_sharded:
            torch._foreach_copy_(list(map(local, self._weights)), list(map(local, self._parameters)))
        elif self._masters:
            torch._foreach_copy_(self._weights, self._parameters)
        # This has written to each weight once. A wrong number would only let the next step compare by value.
        consume(map(setattr, self._masters, repeat("seen"), [version + 1 for version in self._versions]))
        if self._owner.counts_writes:
            consume(map(setattr, self._masters, repeat("given"), _versions(self._parameters, self._are_sharded)))


def _have_both_numbers(master: Master) -> bool:
    """Return whether a weight has numbers beside its master's: it shares their memory until it is cast."""
    return master.weight.dtype != torch.float32 and not master.weight.is_meta


def _versions(tensors: Sequence[Any], are_sharded: bool) -> list[int]:
    """Return the versions of weights or masters; of sharded ones with those of the shards."""
    found = versions_of(tensors)
    for index, tensor in enumerate(tensors) if are_sharded else ():
        found[index] += tensor._local_tensor._version if is_sharded(tensor) else 0
    return found


def _see(masters: Sequence[FullMaster]) -> None:
    """Record that weights are their masters' roundings now."""
    for master, weight, parameter in zip(masters, *_versions_of(masters), strict=True):
        master.seen, master.given = weight, parameter


def _versions_of(masters: Sequence[FullMaster]) -> tuple[list[int], list[int]]:
    """Return the versions of the masters' weights, and of the masters."""
    are_sharded = any(map(_IS_SHARDED, masters))
    return _versions(list(map(_WEIGHT, masters)), are_sharded), _versions(list(map(_PARAMETER, masters)), are_sharded)
