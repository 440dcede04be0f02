"""Unwrapping of optimizers and models by the attributes that wrappers of other libraries document."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

# accelerate's AcceleratedOptimizer and Fabric's and Lightning's optimizers; schedule-free's wrapper.
_OPTIMIZERS: Final = ("optimizer", "base")
# DistributedDataParallel and its like; torch.compile.
_MODELS: Final = ("module", "_orig_mod")
# Libraries whose optimizers only delay or skip the inner step.
_FRAMEWORKS: Final = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
_DEEPEST: Final = 8


def unwrapped(given: Any, is_known: Callable[[Any], bool]) -> Any:
    """Unwrap an optimizer or model.

    Returns:
        The nearest wrapped object that is known; without one the optimizer whose groups and state a wrapper exposes as
        its own; else ``given``. An optimizer with groups or state of its own (Lookahead) is no wrapper. A subclass of
        Optimizer is none either, unless a framework made it: its step does more.
    """
    present, hands_on = given, given
    for _ in range(_DEEPEST):
        if is_known(present):
            return present
        inner = wrapped_in(present)
        if inner is None:
            break
        if hands_on is present and _shows(present, inner):
            hands_on = inner
        present = inner
    return hands_on


def wrapped_in(wrapper: Any) -> Any:
    """Return the optimizer or model in a documented attribute of a wrapper, or None."""
    if isinstance(wrapper, nn.Module):
        names, kind = _MODELS, nn.Module
    else:
        names, kind = _OPTIMIZERS, Optimizer  # type: ignore[assignment]
    found = (getattr(wrapper, name, None) for name in names)
    return next((each for each in found if isinstance(each, kind) and each is not wrapper), None)


def iter_unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model, and the wrapped one for as long as a model is nothing but a wrapper."""
    present: Any = model
    while present is not None:
        yield present
        is_wrapper = len(present._modules) == 1 and not present._parameters and not present._buffers
        present = wrapped_in(present) if is_wrapper else None


def _shows(wrapper: Any, inner: Any) -> bool:
    """Return whether a wrapper of an optimizer has the inner one's groups and state, and steps as that does."""
    if not isinstance(inner, Optimizer) or getattr(wrapper, "base", None) is inner:
        return False
    roots = {base.__module__.partition(".")[0] for base in type(wrapper).__mro__}
    if isinstance(wrapper, Optimizer) and roots.isdisjoint(_FRAMEWORKS):
        return False
    return (
        getattr(wrapper, "param_groups", None) is inner.param_groups and getattr(wrapper, "state", None) is inner.state
    )
