"""Unwrapping of optimizers and models, by attributes that other libraries document for their wrappers."""

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


def unwrapped(wrapper: Any, is_known: Callable[[Any], bool]) -> Any:
    """Unwrap an optimizer or model.

    An optimizer with groups or state of its own (Lookahead) is not a wrapper. A subclass of Optimizer is one only if a
    framework defines it; others do more in their step.

    Args:
        wrapper: the object.
        is_known: whether an object is one to stop at.

    Returns:
        The outermost known object. If there is none, the innermost optimizer that has the groups and state of its
        wrapper. If there is none either, ``wrapper``.
    """
    present, found = wrapper, wrapper
    for _ in range(_DEEPEST):
        if is_known(present):
            return present
        inner = wrapped_in(present)
        if inner is None:
            break
        if found is present and _shows(present, inner):
            found = inner
        present = inner
    return found


def wrapped_in(wrapper: Any) -> Any:
    """Return the optimizer or model in a documented attribute of a wrapper, or None."""
    if isinstance(wrapper, nn.Module):
        names, kind = _MODELS, nn.Module
    else:
        names, kind = _OPTIMIZERS, Optimizer  # type: ignore[assignment]
    found = (getattr(wrapper, name, None) for name in names)
    return next((each for each in found if isinstance(each, kind) and each is not wrapper), None)


def iter_unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model, and then each wrapped model, while a model has nothing but the wrapped one."""
    present: Any = model
    while present is not None:
        yield present
        is_wrapper = len(present._modules) == 1 and not present._parameters and not present._buffers
        present = wrapped_in(present) if is_wrapper else None


def _shows(wrapper: Any, inner: Any) -> bool:
    """Return whether a wrapper of an optimizer has the inner optimizer's groups and state, and steps like it."""
    if not isinstance(inner, Optimizer) or getattr(wrapper, "base", None) is inner:
        return False
    roots = {base.__module__.partition(".")[0] for base in type(wrapper).__mro__}
    if isinstance(wrapper, Optimizer) and roots.isdisjoint(_FRAMEWORKS):
        return False
    return (
        getattr(wrapper, "param_groups", None) is inner.param_groups and getattr(wrapper, "state", None) is inner.state
    )
