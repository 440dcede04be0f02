"""Whether a run in 16 bit says what the same run in float32 said."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .trial import Trial

# A gradient below this share of the whole gradient's norm is compared as if it had that.
_NEGLIGIBLE = 0.01
# A parameter underflows where this share of the elements that should have a gradient has none.
_GONE = 0.5


@dataclass(frozen=True)
class Comparison:
    """How far a run is from the reference.

    Attributes:
        loss: relative error of the loss.
        gradient: the largest relative error of a parameter's gradient.
        tolerance: what both must not be above.
        underflowing: parameters most of whose gradient is 0 here and not in the reference, in modules of which that is
            true of every parameter (a bias in front of a norm has no gradient but rounding errors).
    """

    loss: float
    gradient: float
    tolerance: float
    underflowing: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether loss and gradients are within the tolerance, and no gradient is lost."""
        return self.loss <= self.tolerance and self.gradient <= self.tolerance and not self.underflowing


def compare(trial: Trial, reference: Trial, tolerance: float) -> Comparison:
    """Compare a run with the same run in float32."""
    whole = math.sqrt(sum(float(g.double().square().sum()) for g in reference.gradients.values()))
    errors = (_gradient_error(trial.gradients.get(name), g, whole) for name, g in reference.gradients.items())
    return Comparison(
        loss=_loss_error(trial.loss, reference.loss),
        gradient=max(errors, default=0.0),
        tolerance=tolerance,
        underflowing=_underflowing(trial, reference),
    )


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
