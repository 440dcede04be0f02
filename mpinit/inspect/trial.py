"""Runs of a user's step on copies of model and optimizer at a level, all of it seen, and how far two of them differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.dtypes import is_lower_precision
from ..basics.patching import Undo
from ..settings.resolve import resolve
from ..torch_internals.native_autocast import CastsOff
from .copies import at_level, copy_of_optimizer, float32_copy, kept_from_running
from .faults import OverflowWatch

UserStep = Callable[[Any, Any], Any]
_ADVICE = "let step(model, optimizer) use its arguments"
# A gradient below this share of the whole gradient's norm is compared as if it had that.
_NEGLIGIBLE = 0.01
# A parameter underflows where this share of the elements that should have a gradient has none.
_GONE = 0.5


@final
@dataclass
class Trial:
    """What a run gave.

    Attributes:
        model: the copy that ran.
        watch: what was seen of operations.
        damaged_buffers: names of buffers that the level's type cannot hold, with an error above one part in a hundred.
        loss: the loss, a number.
        gradients: parameter's dotted name -> its unscaled gradient in float32; only of those that have one.
    """

    model: nn.Module
    watch: OverflowWatch
    damaged_buffers: Sequence[str]
    loss: float = math.nan
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def backward_ended(self, *_: Any) -> None:
        """Copy the gradients that the next step would use: the step may clear them."""
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                whole = gradient.to_dense() if gradient.is_sparse else gradient
                self.gradients[name] = whole.detach().to(torch.float32, copy=True)

    def step_ended(self, skipped: bool | torch.Tensor) -> None:
        """What a step does is not compared."""


@final
@dataclass(frozen=True)
class Trials:
    """Runs of a user's step, each on fresh copies and with the same random numbers.

    Attributes:
        model, optimizer: copied; nothing happens to them.
        step: ``step(model, optimizer)`` gives the loss of one batch.
        again: puts back the random numbers that every run begins with.
    """

    model: nn.Module
    optimizer: Optimizer
    step: UserStep
    again: Undo

    def run(self, level: str, keywords: Mapping[str, Any], rounded_to: Iterable[torch.dtype] = ()) -> Trial:
        """Run the step once.

        Args:
            level, keywords: what the copies are initialised with.
            rounded_to: the 16-bit types whose rounding errors are weighed.
        """
        clone = float32_copy(self.model)
        twin = copy_of_optimizer(self.optimizer, dict(zip(self.model.parameters(), clone.parameters(), strict=True)))
        before = {name: buffer.detach().clone() for name, buffer in clone.named_buffers()}
        with CastsOff(), at_level([clone], [twin], *resolve(level, keywords), quiet=True) as session:
            watch = OverflowWatch(clone, rounded_to)
            trial = Trial(clone, watch, _damaged(before, dict(clone.named_buffers())))
            session.managed(twin).observers.append(trial)
            self.again()
            with kept_from_running(self.model, "mpinit.suggest", _ADVICE), watch, torch.enable_grad():
                loss = self.step(clone, twin)
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
            trial.loss = float(loss.detach())
            if not trial.gradients:
                trial.backward_ended()
        return trial


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
        agrees: whether loss and gradients are within the tolerance, no gradient is lost, and nothing left the range.
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
    loss, gradient = math.inf, 0.0
    if math.isfinite(trial.loss):
        # A loss near 0 is compared absolutely: the gradients tell more of it.
        loss = abs(trial.loss - reference.loss) / max(abs(reference.loss), 0.1)
    of_module: dict[str, list[tuple[str, bool]]] = {}
    for name, expected in reference.gradients.items():
        found = trial.gradients.get(name, torch.zeros_like(expected))
        gradient = max(gradient, _error(found, expected, whole))
        meant = expected != 0
        if bool(meant.any()):
            is_gone = float((found[meant] == 0).double().mean()) >= _GONE
            of_module.setdefault(name.rpartition(".")[0], []).append((name, is_gone))
    gone = tuple(name for rows in of_module.values() if all(is_gone for _, is_gone in rows) for name, _ in rows)
    agrees = loss <= tolerance and gradient <= tolerance and not gone and trial.watch.first is None
    return Run(level, keep, trial.loss, loss, gradient, gone, agrees)


def _error(gradient: torch.Tensor, expected: torch.Tensor, whole: float) -> float:
    if not bool(torch.isfinite(gradient).all()):
        return math.inf
    scale = max(float(expected.double().norm()), _NEGLIGIBLE * whole)
    return float((gradient.double() - expected.double()).norm()) / scale if scale > 0 else 0.0
