"""Functions of the user's own under O1: registered by name, or marked with a decorator."""

import difflib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..basics.logs import warn_user
from .cast_lists import Cast
from .casters import user_wrapper
from .installation import INSTALLATION, REGISTERED, Registration, bound_elsewhere

P = ParamSpec("P")
T = TypeVar("T")


def register_half_function(module: Any, name: str) -> None:
    """Make ``module.name`` run in the 16-bit type while casts are on.

    Before or after ``initialize``; undoing the last session takes the wrapper out, the next ``initialize`` puts it
    back. Code that has bound the function before (``from module import name``) keeps the one without casts: a
    warning names the modules where that can be seen.

    Args:
        module: a module, or a class whose (static) method is meant.
        name: the function's name in it.

    Raises:
        ValueError: there is no such function.

    Example:
        >>> import torch, mpinit
        >>> mpinit.register_half_function(torch, "cumsum")
    """
    _register(module, name, Cast.LOWER_PRECISION)


def register_float_function(module: Any, name: str) -> None:
    """Make ``module.name`` run in float32, with casts off inside, while casts are on.

    When it holds, and for which code: as for :func:`register_half_function`.

    Args:
        module: a module, or a class whose (static) method is meant.
        name: the function's name in it.

    Raises:
        ValueError: there is no such function.

    Example:
        >>> import torch, mpinit
        >>> mpinit.register_float_function(torch, "sigmoid")
    """
    _register(module, name, Cast.FP32)


def register_promote_function(module: Any, name: str) -> None:
    """Make ``module.name`` run in the widest floating type among its arguments while casts are on.

    When it holds, and for which code: as for :func:`register_half_function`.

    Args:
        module: a module, or a class whose (static) method is meant.
        name: the function's name in it.

    Raises:
        ValueError: there is no such function.

    Example:
        >>> import torch, mpinit
        >>> mpinit.register_promote_function(torch, "lerp")
    """
    _register(module, name, Cast.PROMOTE)


def half_function(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: the function's arguments are cast to the 16-bit type while casts are on.

    For plain functions, methods, and the ``forward`` of a ``torch.autograd.Function`` (below ``@staticmethod``).
    Floating tensors are found inside nested containers; ``self``, ``cls`` and ``ctx`` are left alone.

    Args:
        function: what is to run in 16 bit.

    Returns:
        A function with the same signature. Its result has the type that the body gives it.

    Example:
        >>> import torch, mpinit
        >>> @mpinit.half_function
        ... def scores(query, key):
        ...     return query @ key.T
        >>> model = mpinit.initialize(torch.nn.Linear(4, 2), opt_level="O1", verbosity=0)
        >>> scores(torch.ones(2, 4), torch.ones(3, 4)).dtype
        torch.float16
        >>> mpinit.undo(model)
    """
    return user_wrapper(Cast.LOWER_PRECISION, function)


def float_function(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: while casts are on, 16-bit arguments are cast to float32 and the body runs with casts off.

    For the same functions as :func:`half_function`.

    Args:
        function: what is to run in float32.

    Returns:
        A function with the same signature.

    Example:
        >>> import torch, mpinit
        >>> @mpinit.float_function
        ... def distance(a, b):
        ...     return (a - b).pow(2).mean()
        >>> model = mpinit.initialize(torch.nn.Linear(4, 2), opt_level="O1", verbosity=0)
        >>> distance(torch.ones(4).half(), torch.zeros(4).half()).dtype
        torch.float32
        >>> mpinit.undo(model)
    """
    return user_wrapper(Cast.FP32, function)


def promote_function(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: while casts are on, arguments are cast to the widest floating type among them.

    For the same functions as :func:`half_function`.

    Args:
        function: what takes arguments of several types.

    Returns:
        A function with the same signature.

    Example:
        >>> import torch, mpinit
        >>> @mpinit.promote_function
        ... def mix(a, b, weight):
        ...     return torch.lerp(a, b, weight)
        >>> model = mpinit.initialize(torch.nn.Linear(4, 2), opt_level="O1", verbosity=0)
        >>> mix(torch.zeros(4).half(), torch.ones(4), 0.5).dtype
        torch.float32
        >>> mpinit.undo(model)
    """
    return user_wrapper(Cast.PROMOTE, function)


def _register(module: Any, name: str, cast: Cast) -> None:
    function = _find(module, name)
    _warn_of_earlier_imports(module, name, function)
    REGISTERED[:] = [each for each in REGISTERED if each.owner is not module or each.name != name]
    REGISTERED.append(Registration(module, name, cast))
    INSTALLATION.refresh_registrations()


def _find(module: Any, name: str) -> Any:
    where = getattr(module, "__name__", repr(module))
    if not isinstance(name, str):
        raise TypeError(f"the name of a function in {where} must be a string, not {name!r}")
    function = INSTALLATION.original(module, name)
    if callable(function):
        return function
    names = [own for own in dir(module) if callable(getattr(module, own, None))]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "; look the name up with dir()"
    raise ValueError(f"there is no function {name!r} in {where}{hint}")


def _warn_of_earlier_imports(module: Any, name: str, function: Any) -> None:
    """Warn of ``from module import name`` done earlier: such a name is bound to the function without casts."""
    found = bound_elsewhere({id(function): name}, module, users_only=False)
    bound = [where for where, _ in found if where.rpartition(".")[0] != getattr(module, "__name__", "")]
    if bound:
        where = getattr(module, "__name__", repr(module))
        warn_user(
            f"{', '.join(bound[:5])} was imported from {where} before {name!r} was registered and keeps the function "
            f"without casts: register before that import, or call it as {where.rpartition('.')[2]}.{name}"
        )
