"""``mpinit.GradScaler``: the interface of ``torch.amp.GradScaler`` over a session's scalers, masters and steps."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, NoReturn, final

import torch
from torch.optim import Optimizer

from . import registry
from .basics.logs import log
from .checkpoint import in_words_of_ours, warn_of_no_start
from .scaling.scaler import LossScaler, check_state
from .session import Session

_NUMBERS = ("growth_factor", "backoff_factor", "growth_interval")
# What torch's own has where nothing else is said.
_USUAL: dict[str, Any] = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


class _Stage(enum.Enum):
    READY = enum.auto()
    UNSCALED = enum.auto()
    STEPPED = enum.auto()


@final
class GradScaler:
    """A session's loss scaling for loops that were written for ``torch.amp.GradScaler``: swap the constructor.

    ``scale(loss).backward()`` leaves scaled gradients on the weights, where they add up; ``unscale_(optimizer)``, or
    else ``step(optimizer)``, unscales and checks them, in float32 where there are masters; ``update()`` moves the
    scale. ``torch.amp.GradScaler`` itself works as well, where ``initialize`` was given ``loss_scale=1.0``.
    Right at every level: where nothing is scaled (a fixed scale of 1) nothing is unscaled, checked or moved.
    The scale and the numbers by which it moves are those that :func:`initialize` was given; a static one stays what it
    is.

    Args:
        owners: an initialised optimizer (or model), or a list or tuple of them, of one session. Every optimizer of the
            session may be stepped, one that is added later too.
        loss_id: which of the session's ``num_losses`` scalers to use.
        enabled: False: the loss goes in as it is, and ``step`` is ``optimizer.step``. As where
            ``initialize(enabled=False)`` was called.

    Raises:
        RuntimeError: an owner was not initialised.
        ValueError: no such ``loss_id``, or owners of different sessions.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> scaler = mpinit.GradScaler(optimizer)
        >>> scaler.scale(model(torch.ones(1, 4)).mean()).backward()
        >>> scaler.unscale_(optimizer)
        >>> _ = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        >>> _ = scaler.step(optimizer)
        >>> scaler.update(); scaler.get_scale()
        65536.0
        >>> mpinit.undo(model)
    """

    def __init__(self, owners: Any, loss_id: int = 0, enabled: bool = True) -> None:
        given = [registry.unwrapped(owner) for owner in (owners if isinstance(owners, (list, tuple)) else [owners])]
        if not given:
            raise ValueError("GradScaler needs an initialised optimizer, or a model of the session that is meant")
        self._loss_id = loss_id
        self._session: Session | None = registry.shared_session(given)
        if self._session is not None:
            self._session.scaler(loss_id)
        if not enabled:
            self._session = None
        self._has_scaled = False
        self._stages: dict[Optimizer, _Stage] = {}
        self._checked: set[Optimizer] = set()

    # -- the loop -----------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply by the scale.

        Args:
            outputs: a floating tensor, or an iterable of such tensors and iterables.

        Returns:
            The same, float32 (float64 stays float64); lists and tuples as such, other iterables as iterators.
        """
        session = self._live()
        if session is None:
            return outputs
        if isinstance(outputs, torch.Tensor):
            self._has_scaled = True
            return session.scaled_output(outputs, self._loss_id)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale and check the optimizer's gradients, once between updates: from here on they may be clipped.

        Args:
            optimizer: of the session.

        Raises:
            RuntimeError: called twice, or after ``step``; or gradients that are not of a loss that was scaled here.
        """
        session = self._live()
        if session is None:
            return
        self._check_used("unscale_")
        optimizer = self._member(session, optimizer)
        stage = self._stages.get(optimizer, _Stage.READY)
        if stage is _Stage.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if stage is _Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._unscale(session, optimizer)

    def _unscale(self, session: Session, optimizer: Optimizer) -> None:
        if session.unscale(optimizer, self._loss_id):
            self._checked.add(optimizer)
        self._stages[optimizer] = _Stage.UNSCALED

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)`` with unscaled gradients, unless one of them is inf or nan.

        Args:
            optimizer: of the session.
            args, kwargs: for its ``step``; no closure.

        Returns:
            What its ``step`` returns; None where it was skipped.

        Raises:
            RuntimeError: called twice between updates, or with a closure.
            AssertionError: the optimizer has no gradient.
        """
        session = self._live()
        if session is None:
            return optimizer.step(*args, **kwargs)
        if kwargs.get("closure") is not None or any(map(callable, args)):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._check_used("step")
        inner = self._member(session, optimizer)
        stage = self._stages.get(inner, _Stage.READY)
        if stage is _Stage.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        # A backward pass after unscale_ has left gradients again.
        if inner not in self._checked or session.managed(inner).gradients.scaled_by is not None:
            self._unscale(session, inner)
        if inner not in self._checked:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        result = None if session.managed(inner).skips_step() else optimizer.step(*args, **kwargs)
        self._stages[inner] = _Stage.STEPPED
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale by what was found since the last update, or set it.

        Args:
            new_scale: the scale from here on, a number or a tensor with one element; a scale that is not dynamic stays.

        Raises:
            AssertionError: no gradients were unscaled since the last update.
            ValueError: ``new_scale`` is 0, negative, inf or nan.
        """
        session = self._live()
        if session is None:
            return
        self._check_used("update")
        scaler = self._scaler(session)
        if new_scale is not None:
            scale = _number(new_scale)
            scaler.forget_notes()
            if scaler.rule.dynamic:
                scaler.set_scale(scale)
            elif scale != scaler.loss_scale():
                log.info("update(%s): the loss scale is static, and stays %s", scale, scaler.loss_scale())
        elif self._checked:
            scaler.update()
        else:
            raise AssertionError("No inf checks were recorded prior to update.")
        self._stages.clear()
        self._checked.clear()

    # -- asking and setting -------------------------------------------------------------------------------------

    def is_enabled(self) -> bool:
        """Whether there is a session: not where it is disabled."""
        return self._session is not None

    def get_scale(self) -> float:
        """The scale in force; 1.0 where disabled. Waits for the device."""
        session = self._live()
        return 1.0 if session is None else self._scaler(session).loss_scale()

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by after ``get_growth_interval()`` good updates in a row."""
        return float(self._get("growth_factor"))

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after good updates: a finite number above 0."""
        self._set(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by on overflow."""
        return float(self._get("backoff_factor"))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by on overflow: a finite number above 0."""
        self._set(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """After how many good updates in a row the scale grows."""
        return int(self._get("growth_interval"))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many good updates in a row the scale grows: a whole number above 0."""
        self._set(growth_interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of ``torch.amp.GradScaler.state_dict()``: five numbers; empty where disabled.

        Where losses are not scaled at all there is ``scales``, False, too.
        """
        session = self._live()
        if session is None:
            return {}
        scaler = self._scaler(session)
        numbers = {name: getattr(scaler.rule, name) for name in _NUMBERS}
        state = {"scale": scaler.loss_scale(), **numbers, "_growth_tracker": scaler.unskipped}
        return state | ({"scales": False} if scaler.is_identity else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`, or of torch's own, all of it or nothing.

        A static scale stays what it is; a dynamic one goes on from the saved one, within its limits, or stays, with a
        warning, where the state was saved without scaling.

        Raises:
            RuntimeError: the state is empty, as that of a disabled scaler is.
            ValueError: it lacks an entry, or one is not possible.
        """
        session = self._live()
        if session is None:
            return
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
            )
        faults = [f"has no {key!r}" for key in ("scale", *_NUMBERS, "_growth_tracker") if key not in state_dict]
        if faults:
            raise ValueError(f"the state {'; it '.join(faults)}; nothing was loaded")
        state = in_words_of_ours(state_dict)
        faults = check_state(state)
        if faults:
            raise ValueError(f"the state {'; it '.join(faults)}; nothing was loaded")
        self._set(**{name: state_dict[name] for name in _NUMBERS})
        if not self._scaler(session).load_state_dict(state):
            warn_of_no_start([self._scaler(session)])

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a GradScaler belongs to its session and cannot be copied or pickled: save scaler.state_dict(), and load "
            "it into the GradScaler of another session"
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _live(self) -> Session | None:
        if self._session is not None and not self._session.is_live:
            raise RuntimeError(
                f"{self._session.describe()} of this GradScaler was undone: make another after mpinit.initialize"
            )
        return self._session

    def _scaler(self, session: Session) -> LossScaler:
        return session.scaler(self._loss_id)

    def _member(self, session: Session, optimizer: Optimizer) -> Optimizer:
        owning = registry.session_of(optimizer)
        if owning is not session:
            raise ValueError(
                f"this {type(optimizer).__name__} belongs to {owning.describe()}, and the GradScaler to "
                f"{session.describe()}: make one for each session"
            )
        inner: Optimizer = registry.unwrapped(optimizer)
        return inner

    def _check_used(self, name: str) -> None:
        if not self._has_scaled:
            raise AssertionError(
                f"Attempted {name} but _scale is None.  This may indicate your script did not use scaler.scale(loss or "
                "outputs) earlier in the iteration."
            )

    def _get(self, name: str) -> Any:
        session = self._live()
        return _USUAL[name] if session is None else getattr(self._scaler(session).rule, name)

    def _set(self, **numbers: Any) -> None:
        for name, value in numbers.items():
            whole = name == "growth_interval"
            is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
            if not is_number or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a {'whole' if whole else 'finite'} number above 0, not {value!r}")
        session = self._live()
        if session is not None:
            scaler = self._scaler(session)
            scaler.rule = dataclasses.replace(scaler.rule, **numbers)


def _number(scale: Any) -> float:
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1 or scale.requires_grad:
            raise AssertionError(
                "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
                "requires_grad=False."
            )
        return float(scale.item())
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"new_scale must be a number or a tensor with one element, not {scale!r}")
    return float(scale)
