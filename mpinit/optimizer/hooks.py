"""The step hooks of an optimizer, run once around a whole step, while the groups contain the weights.

torch wraps the ``step`` of every class of optimizers, and its wrapper runs the hooks. mpinit calls the function inside
the wrapper, with the masters in the groups and perhaps once for each bucket of them, and runs the hooks itself.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, Final

from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as module

# All of torch's wrappers have one code object.
_WRAPPER: Final = Optimizer.profile_hook_step(lambda optimizer: None).__code__
# The step pre-hooks of mpinit for all optimizers, which check the steps that mpinit does not run -> their handles.
_OWN: Final[dict[Callable[..., Any], Any]] = {}


def inside_hooks(step: Any) -> Callable[..., Any] | None:
    """Return the function inside torch's wrapper of a ``step``.

    A wrapper of a learning-rate scheduler may be around it, which only notes that the optimizer was stepped.

    Returns:
        The function, which is not bound; None if other code has replaced the method. It then runs the hooks itself.
    """
    function = getattr(step, "__func__", step)
    while function is not None:
        code = getattr(function, "__code__", None)
        inner: Callable[..., Any] | None = getattr(function, "__wrapped__", None)
        if code is _WRAPPER:
            return inner
        if code is None or code.co_filename != lr_scheduler.__file__:
            return None
        function = inner
    return None


def run_with_hooks(optimizer: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``run(*args, **kwargs)`` between an optimizer's step hooks and those of all optimizers.

    Args:
        args, kwargs: the arguments of ``step``, which begin with the optimizer, as hooks get them from torch. Pre-hooks
            may replace them.
    """
    for hook in chain(module._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()):
        result = None if hook in _OWN else hook(optimizer, args, kwargs)
        if result is not None:
            if not isinstance(result, tuple) or len(result) != 2:
                raise RuntimeError(f"{hook} must return None or a tuple of (new_args, new_kwargs), not {result}")
            args, kwargs = result
    result = run(*args, **kwargs)
    for hook in chain(optimizer._optimizer_step_post_hooks.values(), module._global_optimizer_post_hooks.values()):
        hook(optimizer, args, kwargs)
    return result


def register_check(check: Callable[[Optimizer, Any, Any], None]) -> None:
    """Call ``check`` before every step of the process that mpinit does not run."""
    _OWN[check] = module.register_optimizer_step_pre_hook(check)


def remove_check(check: Callable[[Optimizer, Any, Any], None]) -> None:
    """Reverse :func:`register_check`. May be called again."""
    handle = _OWN.pop(check, None)
    if handle is not None:
        handle.remove()
