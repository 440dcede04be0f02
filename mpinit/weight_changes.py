"""``mpinit.changes``: what steps have changed of a model's 16-bit weights, to be sent to where it is served."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from . import registry
from .basics.dtypes import is_lower_precision
from .basics.wrappers import with_all_inside
from .masters.changes import Changes
from .masters.full import FullMasters


@contextmanager
def changes(model: nn.Module) -> Iterator[Changes]:
    """While the block runs, follow which elements of a model's 16-bit weights change.

    Takes a bit for each of their numbers and looks at each when it is rounded; outside of the block a step pays
    nothing. A weight that was written otherwise than by a step (a load, ``copy_``, an average) is given whole. What is
    float32 (modules that are kept, buffers) is not followed.

    Args:
        model: an initialised model with 16-bit weights.

    Yields:
        The log. ``log.take()`` gives, for each weight that changed since it was last called, the dotted name, the flat
            int64 places, and the 16-bit values there now; after the block, or ``undo``, what is left, once.

    Raises:
        RuntimeError: the model is not initialised, or is followed already.
        ValueError: it has no 16-bit weights, as at O1, with masters in the model or under FSDP2.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O5", verbosity=0)
        >>> mirror = model.weight.detach().clone()
        >>> with mpinit.changes(model) as log:
        ...     model(torch.tensor([[0.0, 1.0]])).sum().backward()
        ...     optimizer.step()
        ...     for name, places, values in log.take():
        ...         _ = mirror.view(-1).index_copy_(0, places, values)
        >>> places, torch.equal(mirror, model.weight)
        (tensor([1]), True)
        >>> mpinit.undo(model)
    """
    session = registry.session_of(model)
    *_, inner = with_all_inside(model)
    weights = {name: p for name, p in inner.named_parameters() if is_lower_precision(p.dtype)}
    if not weights:
        raise ValueError(
            f"{type(inner).__name__} has no 16-bit weights at {session.opt_level}, of which changes could be followed: "
            "compare its state_dict()"
        )
    masters = session.masters
    if masters.changes is not None:
        raise RuntimeError("the changes of this model are followed already: leave the other mpinit.changes block first")
    log = Changes(weights, masters.accessed if isinstance(masters, FullMasters) else None, session.take_writes)
    masters.changes = log
    ended = session.before_undo(log.end)
    try:
        yield log
    finally:
        ended()
        masters.changes = None
        log.end()
