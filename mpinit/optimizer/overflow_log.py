"""The last overflow of an optimizer: the gradients that contain inf or nan, in the order of the backward pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch

from ..basics.tables import counted
from ..distributed.sharding import dense_view
from ..scaling.scaler import LossScaler
from .params import OptimizerParams

_SHOWN: Final = 20


@dataclass(frozen=True)
class BadGradient:
    """A parameter whose gradient contains inf or nan.

    Attributes:
        name: its dotted name.
        elements, infs, nans: the numbers of elements, of inf and of nan.
        largest_finite: the largest magnitude of the finite elements; 0.0 if there are none.
    """

    name: str
    elements: int
    infs: int
    nans: int
    largest_finite: float

    @property
    def share(self) -> float:
        """The share of elements that are inf or nan."""
        return (self.infs + self.nans) / max(self.elements, 1)


@final
@dataclass(frozen=True)
class OverflowReport:
    """One overflow, as :func:`mpinit.overflow_report` returns it.

    Attributes:
        loss_id: the number of the loss that overflowed; None if it is unknown.
        scale: the loss scale of the backward pass; None if it is unknown.
        loss: the unscaled loss; None if reading it would have needed a device sync.
        gradients: the parameters whose gradients contain inf or nan, the largest share first.
        first_module: the dotted name of the last of their modules in the model. None if the gradients of all
            modules contain inf or nan: they do not show the origin then.
        advice: the origin of the overflow, as far as gradients show it, and what to do next.
    """

    loss_id: int | None
    scale: float | None
    loss: float | None
    gradients: tuple[BadGradient, ...]
    first_module: str | None
    advice: str

    @property
    def parameters(self) -> tuple[str, ...]:
        """The dotted names of the parameters of ``gradients``."""
        return tuple(bad.name for bad in self.gradients)

    def __str__(self) -> str:
        if self.loss_id is None and not self.parameters:
            return self.advice
        scale = "unknown" if self.scale is None else f"{self.scale:g}"
        loss = "" if self.loss is None else f", loss {self.loss:g}"
        lines = [
            f"overflow of loss {self.loss_id} at scale {scale}{loss}: {counted(len(self.parameters), 'parameter')}"
        ]
        for bad in self.gradients[:_SHOWN]:
            lines.append(
                f"  {bad.name}: {bad.infs} inf, {bad.nans} nan of {bad.elements}, largest finite "
                f"{bad.largest_finite:.4g}"
            )
        if len(self.gradients) > _SHOWN:
            lines.append(f"  and {len(self.gradients) - _SHOWN} more")
        return "\n".join([*lines, self.advice])


def _advice(loss: float | None, module: str | None, are_all_bad: bool) -> str:
    if loss is not None and not math.isfinite(loss):
        return (
            f"The loss itself was {loss:g}, so it began in the forward pass, in the data or in the loss: "
            "`with mpinit.watch_overflow(model) as watch` around the batch that was skipped names the module"
        )
    if are_all_bad:
        begin = "The" if loss is None else f"The loss was finite ({loss:g}), and the"
        return (
            f"{begin} gradients of every module contain inf or nan, so they do not show where it was made. "
            "`with mpinit.watch_overflow(model) as watch` around the batch that was skipped, forward and backward, "
            "names the module and the operation"
        )
    if module is None:
        return "The gradients have been cleared since: call mpinit.overflow_report(optimizer) before zero_grad()"
    where = f"module {module!r}" if module else "the model's own parameters"
    return (
        f"The backward pass probably reached {where} first, the last in the model whose gradients contain inf or nan: "
        "it, or a part of the model that uses its output, computed them. `with mpinit.watch_overflow(model) as watch` "
        "around the batch that was skipped names the operation. Then keep its module in float32 (keep_fp32; at O1 "
        "compute_fp32), use bfloat16 (opt_level='O5'), or lower the learning rate"
    )


class OverflowLog:
    """The last overflow of one optimizer."""

    def __init__(self, params: OptimizerParams) -> None:
        self.last: OverflowReport | None = None
        self._params = params

    def report(self, losses: int) -> OverflowReport:
        """Return the last overflow, or the gradients as they are now if other parameters have inf or nan.

        Args:
            losses: the number of losses; of one alone the number is known.
        """
        now = self.read(None, None, None)
        if self.last is None and not now.gradients:
            return replace(now, advice="no step of this optimizer has overflowed")
        before = now if self.last is None else self.last
        found = before if not now.gradients or set(before.parameters) == set(now.parameters) else now
        return found if found.loss_id is not None or losses > 1 else replace(found, loss_id=0)

    @torch.no_grad()
    def read(self, scaler: LossScaler | None, scale: float | None, loss: torch.Tensor | None) -> OverflowReport:
        """Return a report of the gradients as they are now, which is a device sync.

        Args:
            scaler, scale, loss: the loss scaler, the loss scale and the loss of their backward pass.
        """
        found = []
        weights = [weight for weight in self._params.parameters() if weight.grad is not None]
        names = self._params.table.names.of_all(weights)
        modules = set(map(_module_of, names))
        for index in _not_finite([weight.grad for weight in weights if weight.grad is not None]):
            found.append(_bad_gradient(names[index], weights[index].grad))
        found.reverse()  # the backward pass begins with a model's last parameters
        value = None if loss is None or loss.numel() != 1 else float(loss.detach())
        # The bias of the last module keeps a finite gradient where an activation in front of it is nan.
        are_all_bad = len(modules) > 1 and modules == {_module_of(bad.name) for bad in found}
        module = _module_of(found[0].name) if found and not are_all_bad else None
        worst = sorted(found, key=lambda bad: -bad.share)
        loss_id = None if scaler is None else scaler.loss_id
        advice = _advice(value, module, are_all_bad)
        return OverflowReport(loss_id, scale, value, tuple(worst), module, advice)


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _not_finite(gradients: Sequence[torch.Tensor]) -> list[int]:
    """Return the indices of gradients that contain inf or nan; with one device sync per device."""
    indices: dict[torch.device, list[int]] = {}
    dense = [dense_view(gradient.coalesce() if gradient.is_sparse else gradient) for gradient in gradients]
    for index, each in enumerate(dense):
        if each.numel():
            indices.setdefault(each.device, []).append(index)
    found: list[int] = []
    for here in indices.values():
        norms = torch._foreach_norm([dense[index] for index in here], math.inf)
        are_finite = torch.stack([norm.isfinite() for norm in norms]).tolist()
        found += [index for index, is_finite in zip(here, are_finite, strict=True) if not is_finite]
    return sorted(found)


def _bad_gradient(name: str, gradient: Any) -> BadGradient:
    dense = dense_view(gradient.coalesce() if gradient.is_sparse else gradient)
    finite = torch.isfinite(dense)
    nans = int(dense.isnan().sum())
    infs = int((~finite).sum()) - nans
    largest = float(torch.where(finite, dense, 0).abs().max())
    return BadGradient(name, dense.numel(), infs, nans, largest)
