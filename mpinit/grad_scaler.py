"""``mpinit.GradScaler``: the interface of ``torch.amp.GradScaler`` over a session's scalers, masters and steps."""

import dataclasses
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Final, Never, NoReturn, final

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from . import registry
from .basics.logs import log
from .checkpoint import from_grad_scaler_state, warn_scale_not_restored
from .config.loss_scale import DynamicLossScale
from .distributed.sharding import is_distributed
from .scaling.scaler import LossScaler, check_state
from .session import Session

# The numbers by which a scale is updated, with torch's defaults.
_USUAL: Final[dict[str, Any]] = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
# Arguments of torch's constructor that have another name in DynamicLossScale.
_OURS: Final = {"init_scale": "init"}


@final
class GradScaler:
    """A session's loss scaling for loops that were written for ``torch.amp.GradScaler``: swap the constructor.

    ``scale(loss).backward()`` leaves scaled gradients on the weights, where they add up; ``unscale_(optimizer)``, or
    else ``step(optimizer)``, unscales and checks them, in float32 where there are masters; ``update()`` moves the
    scale. ``torch.amp.GradScaler`` itself works as well, where ``initialize`` was called with ``loss_scale=1.0``.
    Right at every level: where nothing is scaled (a fixed scale of 1) nothing is unscaled, checked or moved.
    The scale and the numbers by which it moves are those passed to :func:`initialize`; a static one stays what it
    is.

    Args:
        owners: an initialised optimizer (or model), or a list or tuple of them, of one session. Every optimizer of the
            session may be stepped, one that is added later too.
        loss_id: which of the session's ``num_losses`` scalers to use.
        enabled: False: the loss goes in as it is, and ``step`` is ``optimizer.step``. As where
            ``initialize(enabled=False)`` was called.
        torchs: what ``torch.amp.GradScaler`` is made with, such as ``init_scale``: refused.

    Raises:
        TypeError: the arguments are those of ``torch.amp.GradScaler``; the message names the ones to use.
        RuntimeError: an owner was not initialised.
        ValueError: no such ``loss_id``, or owners of different sessions.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> scaler = mpinit.GradScaler(optimizer)
        >>> scaler.scale(model(torch.ones(1, 4)).mean()).backward()
        >>> scaler.unscale_(optimizer)
        >>> _ = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        >>> _ = scaler.step(optimizer)
        >>> scaler.update(); scaler.get_scale()
        65536.0
        >>> mpinit.undo(model)
    """

    def __init__(self, owners: Any = None, loss_id: int = 0, enabled: bool = True, **torchs: Never) -> None:
        if owners is None or isinstance(owners, (str, torch.device)) or torchs:
            raise TypeError(_instead(owners, torchs))
        known = [registry.unwrapped(owner) for owner in (owners if isinstance(owners, (list, tuple)) else [owners])]
        if not known:
            raise ValueError("GradScaler needs an initialised optimizer, or a model of the session that is meant")
        session: Session | None = registry.shared_session(known)
        self._loss_id = loss_id
        self._scaler: LossScaler | None = None if session is None else session.losses.scaler(loss_id)
        self._session = session if enabled else None
        self._has_scaled = False
        self._stages: dict[Optimizer, OptState] = {}
        # Optimizers that had gradients to unscale since the last update.
        self._checked: set[Optimizer] = set()

    # -- the loop -----------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply by the scale.

        Args:
            outputs: a floating tensor, or an iterable of such tensors and iterables.

        Returns:
            The same, float32 (float64 stays float64); lists and tuples as such, other iterables as iterators.
        """
        session, _ = self._live()
        if session is None:
            return outputs
        if isinstance(outputs, torch.Tensor):
            self._has_scaled = True
            return session.losses.scaled_output(outputs, self._loss_id)
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
        session, _ = self._live("unscale_")
        if session is None:
            return
        inner = _member(session, optimizer)
        stage = self._stages.get(inner)
        if stage is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if stage is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._unscale(session, inner)

    def _unscale(self, session: Session, optimizer: Optimizer) -> None:
        if session.losses.unscale(optimizer, self._loss_id):
            self._checked.add(optimizer)
        self._stages[optimizer] = OptState.UNSCALED

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step(*args, **kwargs)`` with unscaled gradients, unless a gradient is inf or nan.

        Args:
            optimizer: an optimizer of the session.
            args, kwargs: arguments of its ``step``, without a closure.

        Returns:
            The result of its ``step``; None if it was skipped.

        Raises:
            RuntimeError: it was called twice between updates, or with a closure.
            AssertionError: the optimizer has no gradient.
        """
        if self._session is not None and (kwargs.get("closure") is not None or any(map(callable, args))):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        session, _ = self._live("step")
        if session is None:
            return optimizer.step(*args, **kwargs)
        inner = _member(session, optimizer)
        if self._stages.get(inner) is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        # There may have been a backward pass after unscale_.
        if inner not in self._checked or session.managed.find(inner).gradients.state.is_scaled:
            self._unscale(session, inner)
        if inner not in self._checked:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        result = None if session.managed.find(inner).skips_step() else optimizer.step(*args, **kwargs)
        self._stages[inner] = OptState.STEPPED
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale by what was found since the last update, or set it.

        Args:
            new_scale: the scale from here on, a number or a tensor with one element; a scale that is not dynamic stays.

        Raises:
            AssertionError: no gradients were unscaled since the last update.
            ValueError: ``new_scale`` is 0, negative, inf or nan.
        """
        session, scaler = self._live("update")
        if session is None or scaler is None:
            return
        if new_scale is None:
            if not self._checked:
                raise AssertionError("No inf checks were recorded prior to update.")
            # A rank that updates without a step reads whether its scale is lowered, because other ranks' may not be.
            are_stepped = all(self._stages.get(each) is OptState.STEPPED for each in self._checked)
            scaler.update(may_wait=is_distributed() and not are_stepped)
        elif scaler.is_dynamic:
            scaler.found_inf = None
            scaler.set_scale(float(new_scale))
        elif float(new_scale) != scaler.loss_scale():
            log.info("update(%s): the loss scale is static, and stays %s", float(new_scale), scaler.loss_scale())
        session.losses.drop_unreached()
        self._stages.clear()
        self._checked.clear()

    # -- asking and setting -------------------------------------------------------------------------------------

    def is_enabled(self) -> bool:
        """Return whether losses are scaled by a session; False where mpinit is disabled."""
        return self._session is not None

    def get_scale(self) -> float:
        """Return the scale, 1.0 where disabled; reading it is a device sync."""
        _, scaler = self._live()
        return 1.0 if scaler is None else scaler.loss_scale()

    def get_growth_factor(self) -> float:
        """Return the factor of the scale after ``get_growth_interval()`` good updates in a row."""
        return float(self._numbers()["growth_factor"])

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor of the scale after good updates, a finite number above 0."""
        self._set(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return the factor of the scale after an overflow."""
        return float(self._numbers()["backoff_factor"])

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor of the scale after an overflow, a finite number above 0."""
        self._set(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return the number of good updates in a row after which the scale grows."""
        return int(self._numbers()["growth_interval"])

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of good updates in a row after which the scale grows, a whole number above 0."""
        self._set(growth_interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of ``torch.amp.GradScaler.state_dict()``.

        Returns:
            Five numbers; with ``"scales": False`` if losses are not scaled; empty if it is disabled.
        """
        _, scaler = self._live()
        if scaler is None:
            return {}
        state = {"scale": scaler.loss_scale(), **self._numbers(), "_growth_tracker": scaler.unskipped}
        return state | ({"scales": False} if scaler.is_identity else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, or of torch's own scaler; if it is not valid, change nothing.

        A static scale does not change. A dynamic scale becomes the saved one, within its limits. If the saved run did
        not scale losses, it is kept, with a warning.

        Raises:
            RuntimeError: the state is empty, as that of a disabled scaler.
            ValueError: it lacks an entry, or an entry is not valid.
        """
        _, scaler = self._live()
        if scaler is None:
            return
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
            )
        faults = [f"has no {key!r}" for key in ("scale", *_USUAL, "_growth_tracker") if key not in state_dict]
        faults = faults or check_state(from_grad_scaler_state(state_dict))
        if faults:
            raise ValueError(f"the state {'; it '.join(faults)}; nothing was loaded")
        self._set(**{name: state_dict[name] for name in _USUAL})
        if not scaler.load_state_dict(from_grad_scaler_state(state_dict)):
            warn_scale_not_restored([scaler])

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a GradScaler belongs to its session and cannot be copied or pickled: save scaler.state_dict(), and load "
            "it into the GradScaler of another session"
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _live(self, name: str | None = None) -> tuple[Session, LossScaler] | tuple[None, None]:
        """Return the session and its scaler, or (None, None) if disabled; refuse to call ``name`` before scale()."""
        session, scaler = self._session, self._scaler
        if session is None or scaler is None:
            return None, None
        if not session.is_live:
            raise RuntimeError(
                f"{session.describe()} of this GradScaler was undone: make another after mpinit.initialize"
            )
        if name is not None and not self._has_scaled:
            raise AssertionError(
                f"Attempted {name} but _scale is None.  This may indicate your script did not use scaler.scale(loss or "
                "outputs) earlier in the iteration."
            )
        return session, scaler

    def _numbers(self) -> dict[str, Any]:
        _, scaler = self._live()
        rule = None if scaler is None else scaler.rule
        return {name: getattr(rule, name) for name in _USUAL} if isinstance(rule, DynamicLossScale) else _USUAL

    def _set(self, **numbers: Any) -> None:
        for name, value in numbers.items():
            whole = name == "growth_interval"
            is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
            if not is_number or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a {'whole' if whole else 'finite'} number above 0, not {value!r}")
        _, scaler = self._live()
        if scaler is not None and isinstance(scaler.rule, DynamicLossScale):
            scaler.rule = dataclasses.replace(scaler.rule, **numbers)


def _instead(owners: Any, arguments: Mapping[str, Any]) -> str:
    """Return the error text for the arguments of torch's own GradScaler, with the line to write in their place."""
    numbers = {_OURS.get(name, name): value for name, value in arguments.items() if name != "device"}
    unknown = [name for name in numbers if name not in (*_OURS.values(), *_USUAL)]
    if unknown:
        return f"GradScaler has no argument {unknown[0]!r}; it has owners, loss_id and enabled"
    what = [f"{name}={value!r}" for name, value in arguments.items()]
    call = ", ".join([*([repr(owners)] if isinstance(owners, (str, torch.device)) else []), *what])
    rule = ", ".join(f"{name}={value!r}" for name, value in numbers.items())
    moved = "model, optimizer" + (f", loss_scale=mpinit.DynamicLossScale({rule})" if rule else "")
    return (
        f"GradScaler({call}): mpinit's needs the optimizer that was initialised, which knows its device, and the "
        f"numbers of a scale are initialize's: mpinit.initialize({moved}), and then mpinit.GradScaler(optimizer)"
    )


def _member(session: Session, optimizer: Optimizer) -> Optimizer:
    owning = registry.session_of(optimizer)
    if owning is not session:
        raise ValueError(
            f"this {type(optimizer).__name__} belongs to {owning.describe()}, and the GradScaler to "
            f"{session.describe()}: make one for each session"
        )
    inner: Optimizer = registry.unwrapped(optimizer)
    return inner
