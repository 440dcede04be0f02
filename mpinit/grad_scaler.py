"""``mpinit.GradScaler``: ``torch.amp.GradScaler`` with a session's rule and scale, for its masters and steps."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Never, NoReturn

import torch
from torch.optim import Optimizer

from . import registry
from .basics.dtypes import is_lower_precision
from .config.loss_scale import RULE_NAMES, DynamicLossScale, check_scale
from .distributed.sharding import is_distributed
from .optimizer.gradients import multiply_and_check_
from .scaling.scaler import LossScaler
from .session import Session


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for initialised optimizers: swap the constructor, and the loop stays as it is.

    ``scale(loss).backward()`` leaves scaled gradients on the weights, where they add up; ``unscale_(optimizer)``, or
    else ``step(optimizer)``, unscales and checks them, in float32 where there are masters; ``update()`` moves the
    scale. Where nothing is scaled (a fixed scale of 1) the scaler is disabled, as by ``enabled=False``. The scale and
    the rule by which it moves are those passed to :func:`initialize`; a static one stays what it is.

    The losses of one step are scaled by a ``GradScaler`` or by :func:`scale_loss`: the other one raises an error.

    Args:
        owners: an initialised optimizer (or model), or a list or tuple of them, of one session. Every optimizer of the
            session may be stepped, one that is added later too.
        loss_id: which of the session's ``num_losses`` scalers to use. Default 0.
        enabled: False: the loss goes in as it is, and ``step`` is ``optimizer.step``. As where
            ``initialize(enabled=False)`` was called. Default True.
        torchs: what ``torch.amp.GradScaler`` is made with, such as ``init_scale``: refused.

    Raises:
        TypeError: the arguments are those of ``torch.amp.GradScaler``; the message names the ones to use.
        RuntimeError: an owner was not initialised; or there are gradients of losses that ``scale_loss`` has scaled.
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
        self._session = session
        self._loss_scaler: LossScaler | None = None if session is None else session.losses.scaler(loss_id)
        first = None if session is None else next(iter(session.managed.members.parameters()), None)
        device = "cpu" if first is None or first.is_meta else first.device.type
        if not enabled or self._loss_scaler is None or self._loss_scaler.is_identity:
            super().__init__(device, enabled=False)
            return
        rule = self._loss_scaler.rule
        moves = rule if isinstance(rule, DynamicLossScale) else DynamicLossScale()
        scale = self._loss_scaler.loss_scale()
        super().__init__(device, scale, moves.growth_factor, moves.backoff_factor, moves.growth_interval)
        self._init_growth_tracker = self._loss_scaler.unskipped

    def scale(self, outputs: Any) -> Any:
        """Multiply by the scale, as ``torch.amp.GradScaler.scale`` does; 16-bit outputs become float32 before."""
        scaler = self._loss_scaler
        if not self._enabled or scaler is None:
            return outputs
        if isinstance(outputs, torch.Tensor):
            self._live().losses.use_only("GradScaler")
            self._check_reduces()
            scaler.to(outputs.device)
            # The tensors of the session's scaler, so that mpinit.loss_scale() and mpinit.state_dict() show them.
            self._scale, self._growth_tracker = scaler.tensors()
            return super().scale(outputs.float() if is_lower_precision(outputs.dtype) else outputs)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # torch refuses float16 gradients here, and has no kernel for bfloat16 ones. Those of masters become float32.
        self._check_reduces()
        session = self._live()
        managed = session.managed.find(optimizer)
        managed.params.sync()
        managed.gradients.widen()
        found = multiply_and_check_(managed.gradients.present(), inv_scale)
        if is_distributed():
            found = session.ranks.reduce(found, inv_scale.device)
        return {} if found is None else {found.device: found}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step with unscaled gradients, unless one is inf or nan, as ``torch.amp.GradScaler.step`` does."""
        if self._enabled and any(map(callable, args)):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        return super().step(optimizer, *args, **kwargs)

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # The optimizer's step decides, with all ranks, by what was found here: so it counts, and logs, a skipped step.
        managed = self._live().managed.find(optimizer)
        found = optimizer_state["found_inf_per_device"]
        managed.gradients.found_inf = torch.stack([each.cpu() for each in found.values()]).amax()
        skips = managed.skips_step()
        if skips:
            optimizer_state["found_inf_per_device"] = {device: torch.ones_like(each) for device, each in found.items()}
        return None if skips else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale by what was found since the last update, within the session's limits, or set it.

        Args:
            new_scale: the scale from here on, a number or a tensor with one element; a scale that is not dynamic stays.
        """
        scaler = self._loss_scaler
        if not self._enabled or scaler is None:
            return
        self._check_scale_growth_tracker("update")
        if new_scale is not None:
            if scaler.is_dynamic:
                scaler.set_scale(float(new_scale))
        else:
            states = self._per_optimizer_states.values()
            found = [each for state in states for each in state["found_inf_per_device"].values()]
            assert found, "No inf checks were recorded prior to update."
            for each in found:
                scaler.record_found_inf(each)
            if isinstance(scaler.rule, DynamicLossScale):
                scaler.rule = dataclasses.replace(
                    scaler.rule,
                    growth_factor=self._growth_factor,
                    backoff_factor=self._backoff_factor,
                    growth_interval=self._growth_interval,
                )
            scaler.update()
        self._per_optimizer_states.clear()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of ``state_dict()``, or of torch's own scaler; a static scale does not change."""
        scaler = self._loss_scaler
        if not self._enabled or scaler is None:
            return
        before = scaler.loss_scale()
        if "scale" in state_dict:
            check_scale(state_dict["scale"], "scale")
        super().load_state_dict(dict(state_dict))
        self._init_scale = self._init_scale if scaler.is_dynamic else before
        scaler.set_scale(self._init_scale)
        scaler.unskipped = self._init_growth_tracker

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a GradScaler belongs to its session and cannot be copied or pickled: save scaler.state_dict(), and load "
            "it into the GradScaler of another session"
        )

    def _check_reduces(self) -> None:
        if self._loss_scaler is not None and is_distributed():
            self._live().ranks.check_reduces(self._loss_scaler)

    def _live(self) -> Session:
        session = self._session
        if session is None or not session.is_live:
            raise RuntimeError("the session of this GradScaler was undone: make another after mpinit.initialize")
        return session


def _instead(owners: Any, arguments: Mapping[str, Any]) -> str:
    """Return the error text for the arguments of torch's own GradScaler, with the line to write in their place."""
    unknown = [name for name in arguments if name not in (*RULE_NAMES, "device")]
    if unknown:
        return f"GradScaler has no argument {unknown[0]!r}; it has owners, loss_id and enabled"
    numbers = ", ".join(f"{RULE_NAMES[name]}={value!r}" for name, value in arguments.items() if name != "device")
    scale = f"loss_scale=mpinit.DynamicLossScale({numbers})" if numbers else "loss_scale='dynamic'"
    return (
        "mpinit.GradScaler belongs to an initialised optimizer: mpinit.GradScaler(optimizer). Its scale and rule are "
        f"those of mpinit.initialize(model, optimizer, ..., {scale})"
    )
