"""``mpinit.changes``: the numbers of an optimizer's weights that a step changes, few of them in 16 bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch.optim import Optimizer

from .. import registry
from ..distributed.sharding import local
from ..masters.masters import IN_FLOAT32
from ..session import Session

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Change:
    """The numbers of one weight that have changed.

    Attributes:
        name: the weight's dotted name in its model.
        indices: positions in the flattened weight, int64, ascending; of a sharded weight in this rank's shard.
        values: the new numbers at ``indices``, in the weight's dtype.
    """

    name: str
    indices: torch.Tensor
    values: torch.Tensor


@contextmanager
def changes(optimizer: Optimizer) -> Iterator[list[Change]]:
    """Find which numbers of an optimizer's weights change inside a ``with`` block, exact to the bit.

    Use it to send weights to an inference server after each step, in reinforcement learning for instance.
    ``weight.view(-1)[indices] = values`` applies a change. The block keeps a copy of the weights and compares at its
    end. A step outside of a block costs nothing more.

    Args:
        optimizer: an initialised optimizer.

    Yields:
        A list that is empty inside the block, and has one :class:`Change` for each changed weight after it.

    Raises:
        RuntimeError: the optimizer is not initialised, gets parameters inside the block, or the block begins or ends
            inside ``float32_weights``.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O5")
        >>> model.load_state_dict({"weight": torch.tensor([[1.0, 1e-6]])})
        <All keys matched successfully>
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> with mpinit.changes(optimizer) as changed:
        ...     optimizer.step()
        >>> [(each.name, each.indices.tolist()) for each in changed]  # 1 - 1e-4 is 1 in bfloat16
        [('weight', [1])]
        >>> mpinit.undo(model)
    """
    session = registry.session_of(optimizer)
    managed = session.managed.find(registry.unwrapped(optimizer))
    _check_weights(session)
    session.values.apply_writes()
    weights = list(managed.parameters())
    before = [_bits(weight).clone() for weight in weights]
    found: list[Change] = []
    yield found
    _check_weights(session)
    session.values.apply_writes()
    known = set(map(id, weights))
    added = next((p for p in managed.parameters() if id(p) not in known), None)
    if added is not None:
        raise RuntimeError(
            f"{session.masters.names.of(added)!r} was added to the optimizer inside `with mpinit.changes(optimizer)`, "
            "and its numbers from before are not known: call add_param_group before the block"
        )
    for weight, old in zip(weights, before, strict=True):
        now = _bits(weight)
        if now.shape != old.shape or now.dtype != old.dtype:
            raise RuntimeError(
                f"{session.masters.names.of(weight)!r} has another shape or dtype than at the beginning of `with "
                "mpinit.changes(optimizer)`: put steps inside of the block, and other changes outside"
            )
        indices = (now != old).any(1).nonzero().squeeze(1)
        if indices.numel():
            values = local(weight.detach()).reshape(-1)[indices]
            found.append(Change(session.masters.names.of(weight), indices, values))


def _check_weights(session: Session) -> None:
    """Refuse a block that begins or ends where the model has float32 parameters in the place of its weights."""
    if session.masters.are_in_model:
        raise RuntimeError(IN_FLOAT32.format("mpinit.changes()"))


def _bits(weight: torch.Tensor) -> torch.Tensor:
    """View the numbers of a weight, in this process, as integers; a complex128 is two."""
    flat = local(weight.detach()).reshape(-1)
    kind = _BITS[min(flat.element_size(), 8)]
    return flat.view(kind).view(flat.numel(), flat.element_size() // kind.itemsize)
