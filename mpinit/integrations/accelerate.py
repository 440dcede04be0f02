"""Accelerate: ``attach`` lets an ``Accelerator`` run backward, clipping, steps and checkpoints over a session."""

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch.optim import Optimizer

from .. import amp, checks, registry
from . import require

require("accelerate")


def attach(accelerator: Any, optimizers: Any) -> None:
    """Let an Accelerator's ``backward``, ``clip_grad_norm_`` and ``save_state`` know of initialised optimizers.

    ``accelerator.backward(loss)`` leaves unscaled gradients, float32 where there are masters; a step that overflows is
    skipped, ``optimizer_step_was_skipped`` says so, prepared schedulers wait; ``save_state`` holds the loss scale too.
    Where nothing is scaled (bfloat16, a scale of 1) only checkpoints need it: what was saved at one level is then
    loaded at any other. ``mpinit.undo`` takes it back.

    Args:
        accelerator: an ``Accelerator(mixed_precision="no")``.
        optimizers: initialised ones, one or a list, from before or after ``prepare``; more may follow in another call.

    Raises:
        ValueError: the Accelerator has mixed precision of its own, or leaves training to DeepSpeed and the like.
        RuntimeError: an optimizer is not initialised, or FSDP is going to replace its parameters.

    Example:
        >>> import accelerate, mpinit, torch
        >>> from mpinit.integrations.accelerate import attach
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> attach(accelerator, optimizer)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.ones(1, 4)).mean())
        >>> optimizer.step(); accelerator.optimizer_step_was_skipped
        False
        >>> mpinit.undo(model)
    """
    check(accelerator)
    given = [registry.unwrapped(optimizer) for optimizer in checks.as_list(optimizers, Optimizer, "optimizers")]
    prepared = [registry.unwrapped(wrapper) for wrapper in accelerator._optimizers]
    if accelerator.distributed_type.name == "FSDP" and not all(optimizer in prepared for optimizer in given):
        raise RuntimeError(
            "FSDP replaces the parameters: first accelerator.prepare(model, optimizer), then mpinit.initialize(model, "
            "optimizer.optimizer), then attach(accelerator, optimizer)"
        )
    session = registry.shared_session(given)
    if session is None:
        return
    session.when_undone(partial(_set_scaler, accelerator, accelerator.scaler))
    others = [] if accelerator.scaler is None else accelerator.scaler.optimizers
    _set_scaler(accelerator, LossScaling(list(dict.fromkeys([*others, *given]))))


def _set_scaler(accelerator: Any, scaler: Any) -> None:
    accelerator.scaler = scaler
    for wrapper in accelerator._optimizers:
        # As the constructor does with the scaler of an Accelerator that has one.
        wrapper.__setstate__({"scaler": scaler})


def check(accelerator: Any) -> None:
    """Refuse an Accelerator that casts, or runs backward, in a way of its own."""
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"mixed_precision={accelerator.mixed_precision!r} casts once more what mpinit casts: make the Accelerator "
            'with mixed_precision="no" (`accelerate launch` and ACCELERATE_MIXED_PRECISION set it too)'
        )
    if accelerator.distributed_type.name in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise ValueError(f"{accelerator.distributed_type.name} keeps precision by itself: use its own settings, or DDP")


class LossScaling:
    """``scale_loss`` in the form of the scaler that Accelerate calls: its backward leaves unscaled gradients."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers

    def scale(self, loss: Any) -> Any:
        return SimpleNamespace(backward=partial(self._backward, loss))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """A step, which Accelerate takes for skipped where ``optimizer.step`` was not called."""
        session = registry.of(optimizer)
        skips = session is not None and session.managed.find(optimizer).skips_step()
        return None if skips else optimizer.step(*args, **kwargs)

    def update(self) -> None:
        """``backward`` has moved the scale."""

    def state_dict(self) -> dict[str, Any]:
        """As :func:`mpinit.state_dict`."""
        return amp.state_dict(self.optimizers[0])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :func:`mpinit.load_state_dict`."""
        amp.load_state_dict(state, self.optimizers[0])

    def _backward(self, loss: Any, **kwargs: Any) -> None:
        with amp.scale_loss(loss, self.optimizers) as scaled:
            scaled.backward(**kwargs)
