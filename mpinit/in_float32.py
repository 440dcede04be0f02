"""``mpinit.float32_weights``: parameters and buffers in float32 for a while, to read, to write and to evaluate."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from . import registry
from .basics.modules import modules_of
from .masters.full import FullMasters
from .model.shared_memory import is_16_bit
from .session import Session


@contextmanager
def float32_weights(owners: Any) -> Iterator[None]:
    """While the block runs, the models of a session have float32 parameters and buffers: what their 16-bit ones mean.

    They read and write as float32, with every bit of the masters, at every level, and forwards compute in float32: for
    averages (``EMAModel(model.parameters())``, ``copy_``, ``lerp_``), surgery, exports and evaluation. At the end what
    was written is rounded into the 16-bit weights, also after an exception. May be nested. Where weights are float32
    anyway nothing is done (O0, O1; ``master_weights="model"``, where forwards inside compute in float32).

    Parameters are other objects inside: take them from the model in the block, not before. Takes 4 bytes a parameter
    where there are no full masters.

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
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O5", verbosity=0)
        >>> with mpinit.float32_weights(model), torch.no_grad():
        ...     _ = model.weight.fill_(1.0001)
        >>> model.weight.dtype, model.state_dict()["bias"].dtype, model.state_dict()["weight"][0, 0].item()
        (torch.bfloat16, torch.float32, 1.000100016593933)
        >>> mpinit.undo(model)
    """
    given = owners if isinstance(owners, (list, tuple)) else [owners]
    known = [owner for owner in map(registry.unwrapped, given) if owner not in registry.disabled]
    with ExitStack() as stack:
        for session in dict.fromkeys(map(registry.session_of, known)):
            stack.enter_context(_of_session(session))
        yield


@contextmanager
def _of_session(session: Session) -> Iterator[None]:
    if session.masters.are_in_model:
        yield
        return
    session.check_idle("mpinit.float32_weights()")
    swap = _Swap(session)
    try:
        session.masters.are_in_model = True
        swap.enter()
        with session.forwards.in_float32():
            yield
    finally:
        try:
            swap.leave()
        finally:
            session.masters.are_in_model = False


class _Swap:
    """What stands in modules inside of the block, and what stood there before."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._places: list[tuple[nn.Module, dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self._wide: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def enter(self) -> None:
        modules = {module: None for model in self._session.models for module in modules_of(model)}
        for module in modules:
            own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            found = [(each, name, tensor) for each in own for name, tensor in each.items() if is_16_bit(tensor)]
            for tensors, name, tensor in found:
                if id(tensor) not in self._wide:
                    self._wide[id(tensor)] = self._widened(tensor)
                self._places.append((module, tensors, name, tensor, self._wide[id(tensor)]))
                tensors[name] = self._wide[id(tensor)]
            if found and isinstance(module, nn.RNNBase):
                module._init_flat_weights()

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        session, values = self._session, self._session.float32_values(tensor)
        if not isinstance(tensor, nn.Parameter):
            return tensor.float() if values is None else values.clone()
        master = session.masters.of(tensor)
        if master is not None and isinstance(session.masters, FullMasters):
            wide = master.parameter
        else:
            wide = nn.Parameter(tensor.float() if values is None else values.float().clone(), tensor.requires_grad)
        if tensor.grad is not None:
            wide.grad = tensor.grad.float()
        return wide

    @torch.no_grad()
    def leave(self) -> None:
        written: dict[int, torch.Tensor] = {}
        rnns: dict[nn.Module, None] = {}
        while self._places:
            module, tensors, name, tensor, wide = self._places.pop()
            present = tensors.get(name)
            # One that was put there inside counts by its values.
            fits = isinstance(present, torch.Tensor) and present.shape == tensor.shape
            written.setdefault(id(tensor), present if fits and present is not None else wide)
            if present is not None:
                tensors[name] = tensor
            if isinstance(module, nn.RNNBase):
                rnns[module] = None
            if id(tensor) in self._wide and not any(place[3] is tensor for place in self._places):
                self._narrow(tensor, written[id(tensor)], self._wide.pop(id(tensor)))
        for rnn in rnns:
            rnn._init_flat_weights()  # type: ignore[operator]

    def _narrow(self, tensor: torch.Tensor, present: torch.Tensor, wide: torch.Tensor) -> None:
        session, values = self._session, present.detach()
        session.masters.are_in_model = False
        try:
            master = session.masters.of(tensor)
            before = None if master is not None else session.float32_values(tensor)
            if master is not None:
                session.masters.load(master, values if present is not wide else values.clone())
            elif not torch.equal(values, tensor.float() if before is None else before.to(values)):
                tensor.copy_(values)
                session.load_values(tensor, values)
        finally:
            session.masters.are_in_model = True
        if isinstance(tensor, nn.Parameter):
            gradient, wide.grad = present.grad, None
            if gradient is not tensor.grad:
                dtype = tensor.grad_dtype if master is not None else tensor.dtype
                tensor.grad = None if gradient is None else gradient.to(dtype or tensor.dtype)
