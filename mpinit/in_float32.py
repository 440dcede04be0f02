"""``mpinit.float32_weights``: parameters and buffers in float32 for a while, to read, to write and to evaluate."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from . import registry
from .model.float32_block import Float32Block
from .session import Session


@contextmanager
def float32_weights(owners: Any) -> Iterator[None]:
    """Set the parameters and buffers of a session's models to their float32 values while the block runs.

    They read and write as float32, with every bit of the masters, at every level, and forwards compute in float32: for
    averages (``EMAModel(model.parameters())``, ``copy_``, ``lerp_``), surgery, exports and evaluation. The optimizers'
    groups contain them, too. At the end numbers are rounded into the 16-bit weights, also after an exception, and
    gradients, ``requires_grad``, hooks, Python attributes and groups are carried back. May be nested. Where weights are
    float32 anyway nothing is done (O0, O1; ``master_weights="model"``, where forwards inside compute in float32).

    Parameters are other objects inside: read them from the model in the block, not before. Every block has the same
    objects, as long as the model's own parameters are the same, so a list of them may be used again in later blocks.
    After a block a kept parameter is the live master with full masters, and elsewhere empty (all nan): a write to it
    raises an error with the next use of the model. Needs 4 bytes per parameter where there are no full masters.

    Args:
        owners: an initialised model or optimizer, or a list or tuple of them.

    Yields:
        None.

    Raises:
        RuntimeError: it is not initialised; or gradients are scaled at the moment. Steps, ``scale_loss`` and
            ``undo`` are refused inside.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O5")
        >>> with mpinit.float32_weights(model), torch.no_grad():
        ...     _ = model.weight.fill_(1.0001)
        >>> model.weight.dtype, model.state_dict()["bias"].dtype, model.state_dict()["weight"][0, 0].item()
        (torch.bfloat16, torch.float32, 1.000100016593933)
        >>> mpinit.undo(model)
    """
    listed = owners if isinstance(owners, (list, tuple)) else [owners]
    known = [owner for owner in map(registry.unwrapped, listed) if owner not in registry.disabled]
    with ExitStack() as stack:
        for session in dict.fromkeys(map(registry.session_of, known)):
            stack.enter_context(_of_session(session))
        yield


@contextmanager
def _of_session(session: Session) -> Iterator[None]:
    if session.masters.are_in_model:
        yield
        return
    session.managed.check_idle("mpinit.float32_weights()")
    if session.float32_block is None:
        session.float32_block = Float32Block(session.models, session.values)
    block = session.float32_block
    members = list(session.managed.shared.members)
    try:
        # Tensors that are made in inference mode have no version counters.
        with torch.inference_mode(False):
            block.enter()
        session.masters.are_in_model = True
        for each in members:
            each.exchange(block.wide)
        with session.forwards.in_float32():
            yield
    finally:
        session.masters.are_in_model = True
        try:
            others = block.replace()
            for each in members:
                each.exchange(others)
                each.narrow_states()
        finally:
            try:
                with torch.inference_mode(False):
                    block.exit()
            finally:
                session.masters.are_in_model = False
                session.values.end_block()
