"""Gradients by their exponents: what a 16-bit type holds of them, at which loss scale."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch.optim import Optimizer

from .. import registry
from ..basics.tables import counted
from ..checks import ends_at_the_caller
from .numbers import dense

# Exponents of the smallest subnormal and the smallest normal number of each type, and of the first beyond it.
_RANGES: Final[Mapping[str, tuple[int, int, int]]] = {"float16": (-24, -14, 16), "bfloat16": (-133, -126, 128)}
# Bits of room for gradients that grow, and for those of activations, which are not counted.
_HEADROOM: Final = 2
_LARGEST_SCALE_EXPONENT: Final = 24


@final
@dataclass(frozen=True)
class GradientHistogram:
    """What :func:`gradient_histogram` found.

    Attributes:
        bins: exponent e -> how many gradients have a magnitude from 2**e up to 2**(e + 1), all parameters together.
        per_parameter: dotted name -> the same for one parameter.
        zeros: dotted name -> how many gradients are 0.
        scale: the present loss scale.
        suggested_scale: the power of two that puts the largest gradient two bits below float16's largest number, at
            most 2**24; None where no gradient is other than 0.
    """

    bins: Mapping[int, int]
    per_parameter: Mapping[str, Mapping[int, int]]
    zeros: Mapping[str, int]
    scale: float
    suggested_scale: float | None

    def share(self, low: float = -math.inf, high: float = math.inf) -> float:
        """The share of nonzero gradients from 2**low up to below 2**high.

        float16 makes 0 of what is below 2**-24, loses digits below 2**-14, and has nothing from 2**16 on; a loss scale
        of 2**k moves these down by k.
        """
        found = sum(number for exponent, number in self.bins.items() if low <= exponent < high)
        return found / max(sum(self.bins.values()), 1)

    def __str__(self) -> str:
        zeros = sum(self.zeros.values())
        lines = [f"{counted(sum(self.bins.values()) + zeros, 'gradient')}, {zeros:,} of them 0"]
        for dtype, scale in (("float16", 1.0), ("float16", self.scale), ("bfloat16", 1.0)):
            subnormal, normal, end = (edge - math.log2(scale) for edge in _RANGES[dtype])
            lines.append(
                f"  {dtype} at scale {scale:g}: {self.share(high=normal):.1%} below the smallest normal number, "
                f"{self.share(high=subnormal):.1%} become 0, {self.share(low=end):.1%} inf"
            )
        if self.suggested_scale is not None:
            lines.append(f"  scale for float16: {self.suggested_scale:g}")
        return "\n".join(lines)


@ends_at_the_caller
@torch.no_grad()
def gradient_histogram(optimizer: Optimizer) -> GradientHistogram:
    """Count the exponents of the gradients that the next step will use, unscaled.

    Call it after ``scale_loss`` and before ``zero_grad()``. What a float16 backward pass has lost already is 0 here;
    counted in bfloat16 or float32 (O0, O5), gradients tell what float16 would lose. Inf and nan are not counted:
    :func:`mpinit.overflow_report` names them.

    Args:
        optimizer: an initialised optimizer.

    Returns:
        The histogram, with counts, shares lost in each type and the scale it suggests.

    Raises:
        RuntimeError: there are no gradients, or the optimizer is not initialised.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, "O5", verbosity=0)
        >>> with mpinit.scale_loss(model(torch.tensor([[1.0, 2.0**-30]])).sum(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> histogram = mpinit.gradient_histogram(optimizer)
        >>> dict(histogram.bins), histogram.share(high=-24)
        ({0: 1, -30: 1}, 0.5)
        >>> mpinit.undo(model)
    """
    session = registry.session_of(optimizer)
    weights = session.watched(optimizer).parameters()
    values = {session.names.of(weight): dense(weight.grad) for weight in weights if weight.grad is not None}
    if not values:
        raise RuntimeError(
            "there are no gradients: call mpinit.gradient_histogram after scale_loss, before zero_grad()"
        )
    counts = {name: _exponents(gradient) for name, gradient in values.items()}
    together = sum(counts.values(), Counter[int]())
    return GradientHistogram(
        bins=dict(sorted(together.items(), reverse=True)),
        per_parameter=counts,
        zeros={name: int((gradient == 0).sum()) for name, gradient in values.items()},
        scale=session.scaler(0).loss_scale(),
        suggested_scale=_suggested(together),
    )


def _exponents(gradient: torch.Tensor) -> Counter[int]:
    values = gradient if gradient.dtype == torch.float64 else gradient.float()
    exponents = torch.frexp(values[values.isfinite() & (values != 0)]).exponent.long() - 1
    found, numbers = torch.unique(exponents, return_counts=True)
    return Counter(dict(zip(found.tolist(), numbers.tolist(), strict=True)))


def _suggested(bins: Mapping[int, int]) -> float | None:
    if not bins:
        return None
    exponent = _RANGES["float16"][2] - 1 - _HEADROOM - max(bins)
    return 2.0 ** min(exponent, _LARGEST_SCALE_EXPONENT)
