"""Accelerate: ``attach`` makes an ``Accelerator`` work with initialised optimizers."""

import weakref
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch.optim import Optimizer

from .. import amp, checks, registry
from . import named, require

accelerate = require("accelerate")


def attach(accelerator: Any, optimizers: Any) -> None:
    """Make an Accelerator's ``backward``, ``clip_grad_norm_`` and ``save_state`` work with initialised optimizers.

    - ``accelerator.backward(loss)`` scales the loss and unscales the gradients, which are float32 where weights have
      masters.
    - A step with an overflow is skipped; ``optimizer_step_was_skipped`` is then True, and prepared schedulers do not
      step.
    - ``save_state`` saves the loss scale too.

    Without loss scaling (bfloat16, a static scale of 1) only checkpoints need it: a checkpoint of one level then loads
    at any other. ``mpinit.undo`` undoes it.

    Args:
        accelerator: an ``Accelerator(mixed_precision="no")``.
        optimizers: an initialised optimizer, or a list of them, before or after ``prepare``. Call it again for more.

    Raises:
        TypeError: ``accelerator`` is not an Accelerator, or ``optimizers`` are not optimizers.
        ValueError: the Accelerator has mixed precision of its own, or uses DeepSpeed or another engine.
        RuntimeError: an optimizer is not initialised, or FSDP will replace its parameters.

    Example:
        >>> import accelerate, mpinit, torch
        >>> from mpinit.integrations.accelerate import attach
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> attach(accelerator, optimizer)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.ones(1, 4)).mean())
        >>> optimizer.step(); accelerator.optimizer_step_was_skipped
        False
        >>> mpinit.undo(model)
    """
    check(accelerator)
    inner = [registry.unwrapped(optimizer) for optimizer in checks.as_list(optimizers, Optimizer, "optimizers")]
    prepared = [registry.unwrapped(wrapper) for wrapper in accelerator._optimizers]
    if not inner:
        raise ValueError("attach needs the initialised optimizers, and got an empty list")
    if accelerator.distributed_type.name == "FSDP" and not all(optimizer in prepared for optimizer in inner):
        raise RuntimeError(
            "FSDP replaces the parameters: first accelerator.prepare(model, optimizer), then mpinit.initialize(model, "
            "optimizer.optimizer), then attach(accelerator, optimizer)"
        )
    session = registry.shared_session(inner)
    if session is None:
        return
    session.when_undone(partial(_restore_scaler, weakref.ref(accelerator), accelerator.scaler))
    others = [] if accelerator.scaler is None else accelerator.scaler.optimizers
    _set_scaler(accelerator, LossScaling(list(dict.fromkeys([*others, *inner]))))


def _restore_scaler(known: weakref.ref[Any], scaler: Any) -> None:
    accelerator = known()
    if accelerator is not None:
        _set_scaler(accelerator, scaler)


def _set_scaler(accelerator: Any, scaler: Any) -> None:
    accelerator.scaler = scaler
    for wrapper in accelerator._optimizers:
        # As Accelerate's constructor does for an Accelerator with a scaler.
        wrapper.__setstate__({"scaler": scaler})


def check(accelerator: Any) -> None:
    """Refuse what is no Accelerator, and an Accelerator with casts or a backward pass of its own."""
    if not isinstance(accelerator, accelerate.Accelerator):
        raise TypeError(
            f"attach(accelerator, optimizers) needs an Accelerator first, not {named(accelerator)}: are they swapped?"
        )
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"mixed_precision={accelerator.mixed_precision!r} casts once more what mpinit casts: make the Accelerator "
            'with mixed_precision="no" (`accelerate launch` and ACCELERATE_MIXED_PRECISION set it too)'
        )
    if accelerator.distributed_type.name in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise ValueError(f"{accelerator.distributed_type.name} keeps precision by itself: use its own settings, or DDP")


class LossScaling:
    """A scaler with the interface that Accelerate calls, over ``scale_loss``: gradients are unscaled after backward."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers

    def scale(self, loss: Any) -> Any:
        return SimpleNamespace(backward=partial(self._backward, loss))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step, unless the step is skipped: Accelerate checks whether ``optimizer.step`` was called."""
        session = registry.of(optimizer)
        return None if session is not None and session.skips_step(optimizer) else optimizer.step(*args, **kwargs)

    def update(self) -> None:
        """Do nothing: ``backward`` has updated the scale."""

    def state_dict(self) -> dict[str, Any]:
        """Return :func:`mpinit.state_dict` of the optimizers."""
        return amp.state_dict(self.optimizers[0])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state by :func:`mpinit.load_state_dict`."""
        amp.load_state_dict(state, self.optimizers[0])

    def _backward(self, loss: Any, **kwargs: Any) -> None:
        with amp.scale_loss(loss, self.optimizers) as scaled:
            scaled.backward(**kwargs)
