"""scale_loss and disable_casts, and the handles of ``amp.init``, apex's first interface."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .... import amp as mp
from ... import _core
from ._amp_state import _amp_state
from .opt import OptimWrapper

disable_casts = mp.disable_casts

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]


def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[torch.Tensor]:
    """Return a context manager in which to run ``scaled_loss.backward()``.

    Args:
        loss: the loss, a tensor with one element.
        optimizers: the optimizer, or a list of those whose gradients the backward pass computes. An overflow in the
            gradients of one skips the steps of all.
        loss_id: the number of the loss, below ``num_losses``. Default 0.
        model: accepted and ignored.
        delay_unscale: True: more backward passes follow before the step. Default False.
        delay_overflow_check: the same as ``delay_unscale``.

    Returns:
        A context manager that yields the scaled loss.

    Raises:
        RuntimeError: an optimizer was not initialised.
        ValueError: there is no such ``loss_id``, or the optimizers' sessions do not share its scaler.
    """
    many = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    is_known = any(_core.session_of(optimizer) is not None for optimizer in many)
    if _amp_state.disabled and not is_known:
        return nullcontext(loss)
    later = delay_unscale or delay_overflow_check
    if len(many) == 1 or not is_known:
        return mp.scale_loss(loss, many, loss_id, delay_overflow_check=later)
    # The block that is entered first exits last. It alone updates the scale, after all blocks have checked gradients.
    blocks = [
        mp.scale_loss(loss, group, loss_id, delay_overflow_check=later or index > 0)
        for index, group in enumerate(_groups_by_session(many, loss_id))
    ]
    session: Any = _core.session_of(many[0])
    return _skip_together(blocks, many if session.scalers[loss_id].is_dynamic else [])


@contextmanager
def _skip_together(blocks: list[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Enter several blocks as one; after them, an overflow of one optimizer skips the steps of all.

    mpinit skips the steps of those optimizers whose own gradients overflowed; apex skips the steps of all that the loss
    was scaled for. An overflow of another loss, from before these blocks, is not passed on. No device sync is needed.
    """
    with ExitStack() as entered:
        scaled: list[torch.Tensor] = [entered.enter_context(block) for block in blocks]
        # Every block yields the loss times the same scale, and the user calls backward() on one of these.
        for block in blocks[1:]:
            block.skip_use_check()
        before = _core.overflows(optimizers)
        yield scaled[0]
    _core.share_overflow(before)


def _groups_by_session(optimizers: Sequence[Any], loss_id: int) -> Iterator[list[Any]]:
    """Yield the optimizers of each session; if the sessions have different scalers, one list, which mpinit refuses."""
    sessions = [_core.session_of(optimizer) for optimizer in optimizers]
    known = [session for session in sessions if session is not None]
    if len(known) < len(sessions) or len({tuple(map(id, session.scalers[loss_id:][:1])) for session in known}) > 1:
        yield list(optimizers)
        return
    for session in dict.fromkeys(known):
        yield [optimizer for optimizer, own in zip(optimizers, sessions, strict=True) if own is session]


class _Handle(ABC):
    """What all handles have.

    Attributes:
        has_cache, verbose: kept for scripts that read them.
    """

    has_cache = verbose = False

    @abstractmethod
    def is_active(self) -> bool:
        """Return whether functions are cast and losses scaled."""

    @abstractmethod
    def _begin(self, optimizer: Optimizer, num_loss: int) -> None:
        """Let the losses of an optimizer that is being wrapped be scaled."""

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Wrap an optimizer that steps for several losses.

        Args:
            optimizer: the optimizer.
            num_loss: number of losses between two steps. Default 1.
        """
        self._begin(optimizer, num_loss)
        return OptimWrapper(optimizer, self, num_loss)

    def _clear_cache(self) -> None:
        torch.clear_autocast_cache()

    def remove_cache(self, param: torch.Tensor) -> None:
        """Forget the casts of weights, those of others too: torch has one cache."""
        torch.clear_autocast_cache()


class AmpHandle(_Handle):
    """The handle that ``amp.init`` returns: functions cast their arguments until :meth:`_deactivate`.

    Args:
        loss_scale: "dynamic", or a number above 0.
        enable_caching, verbose: kept for scripts that read them.
        allow_banned: True: functions that apex bans in 16 bits run in float32.
        patch_type: the 16-bit dtype of functions.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        allow_banned: bool = False,
        patch_type: torch.dtype = torch.float16,
    ) -> None:
        self._loss_scale = loss_scale
        self.has_cache, self.verbose = enable_caching, verbose
        self._is_active = True
        self._wraps = False
        # Those of the losses that are scaled by the handle itself share one scale; a wrapped one has its own.
        self._optimizers: list[Any] = []
        self._stack = ExitStack()
        with ExitStack() as undone:
            if allow_banned:
                undone.enter_context(_core.banned_in_float32())
            # A session without parameters: it casts functions, and nothing else.
            casts = nn.Module()
            properties = {"loss_scale": 1.0, "patch_torch_functions_type": patch_type}
            _core.start(casts, None, "O1", properties, cast_policy="apex")
            undone.callback(mp.undo, casts)
            self._stack = undone.pop_all()

    def is_active(self) -> bool:
        """Return whether functions are cast and losses scaled."""
        return self._is_active

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        was_active, self._is_active = self._is_active, False
        try:
            with mp.disable_casts():
                yield
        finally:
            self._is_active = was_active

    @contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Optimizer) -> Iterator[torch.Tensor]:
        """Yield the loss times the scale, for ``backward()``; unscale the optimizer's gradients after it.

        Args:
            loss: the loss, a tensor with one element.
            optimizer: the optimizer whose gradients the backward pass computes. A step after an overflow is skipped.

        Raises:
            RuntimeError: an optimizer was wrapped, and has a ``scale_loss`` of its own.
        """
        if not self.is_active():
            yield loss
            return
        if self._wraps:
            raise RuntimeError(
                "after handle.wrap_optimizer(optimizer), scale losses by the wrapped optimizer: "
                "with optimizer.scale_loss(loss) as scaled_loss"
            )
        if _core.session_of(optimizer) is None:
            self._start(optimizer, 1)
            first = _core.session_of(self._optimizers[0])
            if optimizer is not self._optimizers[0]:
                _core.share_scalers(first, [_core.session_of(optimizer)])
        with mp.scale_loss(loss, optimizer) as scaled:
            yield scaled

    def _begin(self, optimizer: Optimizer, num_loss: int) -> None:
        self._wraps = True
        if self.is_active() and _core.session_of(optimizer) is None:
            self._start(optimizer, num_loss)

    def _start(self, optimizer: Any, num_losses: int) -> None:
        """Let the optimizer's losses be scaled: a session over its parameters that casts nothing."""
        parameters = nn.ParameterList([p for group in optimizer.param_groups for p in group["params"]])
        properties = {"patch_torch_functions": False, "loss_scale": self._loss_scale, "num_losses": num_losses}
        _core.start(parameters, optimizer, "O1", properties)
        self._optimizers.append(optimizer)

    def _deactivate(self) -> None:
        """Undo ``amp.init``: functions and optimizers are as before. A second call does nothing."""
        self._is_active = False
        if _amp_state.handle is self:
            _amp_state.handle = _OF_SESSIONS
        while self._optimizers:
            optimizer = self._optimizers.pop()
            if _core.session_of(optimizer) is not None:
                mp.undo(optimizer)
        self._stack.close()


class NoOpHandle(_Handle):
    """The handle of ``amp.init(enabled=False)``, which does nothing."""

    def is_active(self) -> bool:
        """Return False."""
        return False

    def _begin(self, optimizer: Optimizer, num_loss: int) -> None: ...

    def _disable_casts(self) -> AbstractContextManager[None]:
        return nullcontext()

    def scale_loss(self, loss: torch.Tensor, optimizer: Optimizer) -> AbstractContextManager[torch.Tensor]:
        """Return a context manager that yields the loss."""
        return nullcontext(loss)

    def _deactivate(self) -> None: ...


class SessionHandle(_Handle):
    """The handle after ``amp.initialize``: :meth:`_deactivate` ends the casts of functions, and nothing else."""

    has_cache = True

    def is_active(self) -> bool:
        """Return whether such a session is live."""
        return bool(self._sessions())

    def _begin(self, optimizer: Optimizer, num_loss: int) -> None: ...

    def scale_loss(self, loss: torch.Tensor, optimizer: Optimizer) -> AbstractContextManager[torch.Tensor]:
        """Do what ``amp.scale_loss`` does."""
        return scale_loss(loss, optimizer)

    def _disable_casts(self) -> AbstractContextManager[None]:
        return mp.disable_casts()

    def _deactivate(self) -> None:
        for session in self._sessions():
            _core.end_casts(session)

    @staticmethod
    def _sessions() -> list[Any]:
        return [session for session in _core.live_sessions() if session.properties.patch_torch_functions]


_OF_SESSIONS = _amp_state.handle = SessionHandle()


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    patch_type: torch.dtype = torch.float16,
) -> AmpHandle | NoOpHandle:
    """Cast functions from here on, by apex's cast policy: apex's first interface. No model is changed.

    Args:
        enabled: False: return a handle that does nothing. Default True.
        loss_scale: "dynamic", or a number above 0. Default "dynamic".
        enable_caching: kept for scripts that read it. A weight is cast at each use, because it may change between two
            uses without notice. In the forward of a model of ``amp.initialize`` it is cast once. Default True.
        verbose: kept for scripts that read it. Default False.
        allow_banned: True: functions that apex bans in 16 bits, ``binary_cross_entropy``, run in float32. Default
            False: they raise NotImplementedError with 16-bit arguments.
        patch_type: the 16-bit dtype of functions, as in ROCm's apex. Default torch.float16.

    Returns:
        The handle, with ``scale_loss`` and ``wrap_optimizer``. A later call of ``init`` deactivates an earlier handle.

    Example:
        >>> from mpinit.compat.apex import amp
        >>> handle = amp.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with handle.scale_loss(model(torch.ones(1, 4)).float().sum(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> handle._deactivate()
    """
    earlier = _amp_state.handle
    if isinstance(earlier, AmpHandle):
        earlier._deactivate()
    handle = AmpHandle(loss_scale, enable_caching, verbose, allow_banned, patch_type) if enabled else NoOpHandle()
    _amp_state.handle = handle
    return handle
