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
    """Make the parameters and buffers of initialised models float32 while the block runs, with the masters' values.

    Use it to average weights (``EMAModel(model.parameters())``, ``copy_``, ``lerp_``), to change them, to export and to
    evaluate. Inside, forwards compute in float32. At the end the values are rounded into the 16-bit weights, also after
    an exception, and masters keep every bit. Blocks of the same models may be nested. At O0 and O1 weights are float32
    anyway, and nothing is done; with ``master_weights="model"`` only forwards change.

    The block is for values only. Inside, the parameters are other objects: get them from the model in the block, and do
    not use them after it. Do not replace them, and give them no gradients, hooks or another ``requires_grad``. It needs
    4 bytes per parameter where there are no full masters.

    Args:
        owners: an initialised model or optimizer, or a list or tuple of them.

    Yields:
        None.

    Raises:
        RuntimeError: it is not initialised; gradients are scaled at the moment; a block of other models is open; or, at
            the end, a parameter has changed in something else than its values. Steps, ``scale_loss``, ``undo`` and a
            ``backward()`` into these parameters are refused inside.

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
    inside = [session for session in registry.live() if session.masters.are_in_model]
    sessions = [each for each in dict.fromkeys(map(registry.session_of, known)) if each not in inside]
    if sessions and inside:
        raise RuntimeError(
            f"mpinit.float32_weights() of {sessions[0].describe()} was called inside a block of "
            f"{inside[0].describe()}: pass the models of both to one call, mpinit.float32_weights([model, other])"
        )
    with ExitStack() as stack:
        for session in sessions:
            stack.enter_context(_of_session(session))
        yield


@contextmanager
def _of_session(session: Session) -> Iterator[None]:
    session.managed.check_idle("mpinit.float32_weights()")
    session.masters.follow_writes()
    masters, casts, models = session.masters, session.casts, session.models
    block: Float32Block | None = masters.kept_slots
    # Tensors that are made in inference mode have no version counters.
    with torch.inference_mode(False):
        if block is None or not block.is_current(models):
            block = masters.kept_slots = Float32Block(models, casts)
    try:
        with torch.inference_mode(False):
            block.enter(casts)
        session.masters.are_in_model = True
        with session.forwards.in_float32():
            yield
    finally:
        try:
            with torch.inference_mode(False):
                block.exit(models, casts)
        finally:
            session.masters.are_in_model = False
