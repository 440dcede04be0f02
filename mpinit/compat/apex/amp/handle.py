"""scale_loss and disable_casts, and the handles of ``amp.init``, apex's first interface."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .... import amp as mp
from ... import _core
from ._amp_state import _amp_state

disable_casts = mp.disable_casts


def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[torch.Tensor]:
    """Return a context manager that yields the scaled loss, in which to run ``scaled_loss.backward()``.

    Arguments and errors are those of :func:`mpinit.scale_loss`. The optimizers may be of several sessions that share
    the loss's scaler. An overflow in the gradients of one skips the steps of all; with ``mpinit.scale_loss`` each
    decides by its own gradients.
    """
    many = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    sessions: list[Any] = [_core.session_of(optimizer) for optimizer in many]
    if _amp_state.disabled and not any(sessions):
        return nullcontext(loss)
    later = delay_unscale or delay_overflow_check
    scalers = {id(scaler) for session in sessions if session for scaler in session.scalers[loss_id:][:1]}
    if len(many) == 1 or not all(sessions) or len(scalers) != 1:
        return mp.scale_loss(loss, many, loss_id, delay_overflow_check=later)  # refuses what cannot be scaled
    # One block for each session. The one that is entered first exits last: it alone updates the scale, after all blocks
    # have checked gradients.
    blocks = [
        mp.scale_loss(
            loss,
            [optimizer for optimizer, session in zip(many, sessions, strict=True) if session is own],
            loss_id,
            delay_overflow_check=later or index > 0,
        )
        for index, own in enumerate(dict.fromkeys(sessions))
    ]
    return _core.in_all(blocks, many if sessions[0].scalers[loss_id].is_dynamic else [])


class AmpHandle:
    """The handle that :func:`init` returns: it scales losses, and its casts end with :meth:`_deactivate`."""

    def __init__(self, loss_scale: float | str = "dynamic", enable_caching: bool = True, verbose: bool = False) -> None:
        self._loss_scale = loss_scale
        self.has_cache, self.verbose = enable_caching, verbose
        self._is_active = False
        self._wraps = False
        # Those of the losses that are scaled by the handle itself share one scale; a wrapped one has its own.
        self._optimizers: list[Any] = []
        self._stack = ExitStack()

    def _activate(self, patch_type: torch.dtype, allow_banned: bool) -> None:
        properties = {"loss_scale": 1.0, "patch_torch_functions_type": patch_type}
        self._stack.enter_context(_core.casts_of_functions(properties, allow_banned))
        self._is_active = True

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

        A step after an overflow is skipped. A handle that is not active yields the loss.

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
        self._start(optimizer, 1)
        with mp.scale_loss(loss, optimizer) as scaled:
            yield scaled

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> "OptimWrapper":
        """Wrap an optimizer that steps for several losses.

        ``num_loss`` is the number of losses between two steps.
        """
        self._wraps = True
        if self.is_active():
            self._start(optimizer, num_loss)
        return OptimWrapper(optimizer, self, num_loss)

    def _start(self, optimizer: Any, num_losses: int) -> None:
        """Let an optimizer's losses be scaled: by a session over its parameters that casts nothing."""
        if _core.session_of(optimizer) is not None:
            return
        parameters = nn.ParameterList([p for group in optimizer.param_groups for p in group["params"]])
        properties = {"patch_torch_functions": False, "loss_scale": self._loss_scale, "num_losses": num_losses}
        _core.start(parameters, optimizer, "O1", properties)
        self._optimizers.append(optimizer)
        first, own = (_core.session_of(each) for each in (self._optimizers[0], optimizer))
        if not self._wraps and first is not None and own is not None:
            own.scalers[:] = first.scalers

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


class OptimWrapper:
    """An optimizer whose losses are scaled one after the other, each with a scale of its own.

    ``handle.wrap_optimizer`` makes it. All attributes but these are the optimizer's.
    """

    def __init__(self, optimizer: Optimizer, amp_handle: Any, num_loss: int) -> None:
        self.optimizer = optimizer  # the name by which mpinit finds it
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0

    @contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the next loss, scaled, for ``backward()``.

        Raises:
            RuntimeError: more losses than ``num_loss`` since the last step.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise RuntimeError(
                f"scale_loss was called {self._loss_idx + 1} times since the last step, and this optimizer was wrapped "
                f"for {self._num_loss}: handle.wrap_optimizer(optimizer, num_loss={self._loss_idx + 1})"
            )
        loss_id, self._loss_idx = self._loss_idx, self._loss_idx + 1
        with mp.scale_loss(loss, self.optimizer, loss_id) as scaled:
            yield scaled

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, or skip the step after an overflow in any of the losses.

        Raises:
            NotImplementedError: a closure was passed while amp is active.
        """
        self._loss_idx = 0
        if closure is not None and self._amp_handle.is_active():
            raise NotImplementedError("the optimizer of amp.init takes no closure: call backward(), then step()")
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while a copy or a pickle is made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return repr(self.optimizer)


class SessionHandle:
    """The handle after ``amp.initialize``: :meth:`_deactivate` undoes the sessions that cast functions."""

    has_cache, verbose = True, False  # scripts read them
    scale_loss = staticmethod(scale_loss)
    _disable_casts = staticmethod(mp.disable_casts)

    def is_active(self) -> bool:
        """Return whether a session that casts functions is live."""
        return bool(self._sessions())

    def _deactivate(self) -> None:
        _core.undo_all(self._sessions())

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
) -> AmpHandle:
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
    if isinstance(_amp_state.handle, AmpHandle):
        _amp_state.handle._deactivate()
    handle = AmpHandle(loss_scale, enable_caching and enabled, verbose)
    if enabled:
        handle._activate(patch_type, allow_banned)
    _amp_state.handle = handle
    return handle
