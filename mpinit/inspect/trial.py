"""Runs of a user's step on copies of model and optimizer at a level, all of it seen, and how far two of them differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.dtypes import is_lower_precision
from ..settings.resolve import resolve
from ..torch_internals.native_autocast import CastsOff
from .copies import at_level, copy_of_optimizer, float32_copy, kept_from_running, random_numbers
from .faults import OverflowWatch

UserStep = Callable[[Any, Any], Any]
_ADVICE = "let step(model, optimizer) use its arguments"
# A gradient below this share of the whole gradient's norm is compared as if it had that.
_NEGLIGIBLE = 0.01
# A parameter underflows where this share of the elements that should have a gradient has none.
_GONE = 0.5


@dataclass(frozen=True)
class Trial:
    """What a run gave.

    Attributes:
        watch: what was seen of operations.
        loss: the loss, a number.
        gradients: parameter's dotted name -> its unscaled gradient in float32; only of those that have one.
        damaged_buffers: names of buffers that the level's type cannot hold, with an error above one part in a hundred.
    """

    watch: OverflowWatch
    loss: float
    gradients: Mapping[str, torch.Tensor]
    damaged_buffers: Sequence[str]


@final
class Trials:
    """Runs of a user's step, each on fresh copies and with the same random numbers.

    Args:
        model, optimizer: copied; nothing happens to them.
        step: ``step(model, optimizer)`` gives the loss of one batch.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, step: UserStep) -> None:
        self._model = model
        self._optimizer = optimizer
        self._step = step
        self.restore_random_numbers = random_numbers()

    def run(self, level: str, keywords: Mapping[str, Any], rounded_to: Iterable[torch.dtype] = ()) -> Trial:
        """Run the step once.

        Args:
            level, keywords: what the copies are initialised with.
            rounded_to: the 16-bit types whose rounding errors are weighed.
        """
        clone = float32_copy(self._model)
        copies = dict(zip(self._model.parameters(), clone.parameters(), strict=True))
        twin = copy_of_optimizer(self._optimizer, copies)
        before = {name: buffer.detach().clone() for name, buffer in clone.named_buffers()}
        name, properties = resolve(level, keywords)
        with CastsOff(), at_level([clone], [twin], name, properties, quiet=True) as session:
            gradients = _Gradients(clone)
            session.managed(twin).observers.append(gradients)
            watch = OverflowWatch(clone, rounded_to)
            damaged = _damaged(before, dict(clone.named_buffers()))
            self.restore_random_numbers()
            with kept_from_running(self._model, "mpinit.suggest", _ADVICE), watch, torch.enable_grad():
                loss = self._step(clone, twin)
                if watch.batch is None:
                    raise ValueError(
                        "step(model, optimizer) did not run the model it was given: it has to use its arguments"
                    )
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    raise TypeError(
                        f"step(model, optimizer) must return the loss, a tensor of one number, not {loss!r:.80}"
                    )
                if not watch.went_backward and loss.requires_grad:
                    with session.scaled(loss, [twin], 0, False) as scaled_loss:
                        scaled_loss.backward()
            if not gradients.found:
                gradients.copy()
        return Trial(watch, float(loss.detach()), gradients.found, damaged)


@final
class _Gradients:
    """The gradients of the last backward pass: a step may clear them."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self._names = dict(model.named_parameters())

    def backward_ended(self, loss: torch.Tensor, scaler: Any) -> None:
        self.copy()

    def step_ended(self, skipped: bool | torch.Tensor) -> None:
        return

    def copy(self) -> None:
        """Copy what the next step would use."""
        for name, parameter in self._names.items():
            gradient = parameter.grad
            if gradient is not None:
                whole = gradient.to_dense() if gradient.is_sparse else gradient
                self.found[name] = whole.detach().to(torch.float32, copy=True)


def _damaged(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    damaged = []
    for name, buffer in after.items():
        old = before.get(name)
        if old is None or not is_lower_precision(buffer.dtype) or old.dtype == buffer.dtype:
            continue
        finite = torch.isfinite(old)
        difference = (buffer.double() - old.double())[finite].abs()
        if bool((difference > 0.01 * old.double()[finite].abs()).any()):
            damaged.append(name)
    return damaged


# -- two runs compared ------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Run:
    """One run of the step, beside the same run in float32.

    Attributes:
        level: what the copy was initialised at; "float32" is the reference.
        keep_fp32: what it kept in float32.
        loss: what came out.
        loss_error: of the loss, relative to the reference.
        gradient_error: the largest of a parameter's gradient, relative to the reference.
        underflowing: parameters most of whose gradient is 0 here and not in the reference, in modules of which that is
            true of every parameter (a bias in front of a norm has no gradient but rounding errors).
        agrees: whether loss and gradients are within the tolerance, and no gradient is lost.
    """

    level: str
    keep_fp32: tuple[str, ...]
    loss: float
    loss_error: float
    gradient_error: float
    underflowing: tuple[str, ...]
    agrees: bool


def compare(trial: Trial, reference: Trial, tolerance: float, level: str, keep: tuple[str, ...]) -> Run:
    """Compare a run with the same run in float32."""
    whole = math.sqrt(sum(float(g.double().square().sum()) for g in reference.gradients.values()))
    errors = (_gradient_error(trial.gradients.get(name), g, whole) for name, g in reference.gradients.items())
    loss, gradient = _loss_error(trial.loss, reference.loss), max(errors, default=0.0)
    gone = _underflowing(trial, reference)
    agrees = loss <= tolerance and gradient <= tolerance and not gone
    return Run(level, keep, trial.loss, loss, gradient, gone, agrees)


def _loss_error(loss: float, reference: float) -> float:
    if not math.isfinite(loss):
        return math.inf
    # A loss near 0 is compared absolutely: the gradients tell more of it.
    return abs(loss - reference) / max(abs(reference), 0.1)


def _gradient_error(gradient: torch.Tensor | None, reference: torch.Tensor, whole: float) -> float:
    if gradient is None:
        gradient = torch.zeros_like(reference)
    if not bool(torch.isfinite(gradient).all()):
        return math.inf
    scale = max(float(reference.double().norm()), _NEGLIGIBLE * whole)
    return float((gradient.double() - reference.double()).norm()) / scale if scale > 0 else 0.0


def _underflowing(trial: Trial, reference: Trial) -> tuple[str, ...]:
    of_module: dict[str, list[tuple[str, bool]]] = {}
    for name, gradient in reference.gradients.items():
        if bool((gradient != 0).any()):
            gone = _underflows(trial.gradients.get(name), gradient)
            of_module.setdefault(name.rpartition(".")[0], []).append((name, gone))
    return tuple(name for rows in of_module.values() if all(gone for _, gone in rows) for name, _ in rows)


def _underflows(gradient: torch.Tensor | None, reference: torch.Tensor) -> bool:
    meant = reference != 0
    if gradient is None or not bool(meant.any()):
        return gradient is None
    return float((gradient[meant] == 0).double().mean()) >= _GONE
