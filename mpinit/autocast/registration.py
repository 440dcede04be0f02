"""Casts of a user's own functions under O1, which are registered by name or decorated."""

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

    Call it before or after ``initialize``. The registration lasts for the process: ``undo`` of the last session removes
    the wrapper, and the next ``initialize`` installs it again. Code that imported the function earlier (``from module
    import name``) calls it without casts; a warning names the modules that did.

    Args:
        module: a module, or a class for one of its methods.
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

    Args:
        module, name: as for :func:`register_half_function`, which says how long it lasts and which calls it reaches.

    Example:
        >>> import torch, mpinit
        >>> mpinit.register_float_function(torch, "sigmoid")
    """
    _register(module, name, Cast.FP32)


def register_promote_function(module: Any, name: str) -> None:
    """Make ``module.name`` run in the widest floating dtype among its arguments while casts are on.

    Args:
        module, name: as for :func:`register_half_function`, which says how long it lasts and which calls it reaches.

    Example:
        >>> import torch, mpinit
        >>> mpinit.register_promote_function(torch, "lerp")
    """
    _register(module, name, Cast.PROMOTE)


def half_function(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function: its floating arguments are cast to the 16-bit dtype while casts are on.

    It can be a plain function, a method, or the ``forward`` of a ``torch.autograd.Function`` (below
    ``@staticmethod``). Tensors inside nested containers are cast too; ``self``, ``cls`` and ``ctx`` are not.

    Args:
        function: the function to run in 16 bits.

    Returns:
        A function with the same signature. Its result is not cast.

    Example:
        >>> import torch, mpinit
        >>> @mpinit.half_function
        ... def scores(query, key):
        ...     return query @ key.T
        >>> model = mpinit.initialize(torch.nn.Linear(4, 2), opt_level="O1")
        >>> scores(torch.ones(2, 4), torch.ones(3, 4)).dtype
        torch.float16
        >>> mpinit.undo(model)
    """
    return user_wrapper(Cast.LOWER_PRECISION, function)


def float_function(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function: while casts are on, 16-bit arguments are cast to float32, and it runs with casts off.

    Args:
        function: the function to run in float32, of a kind that :func:`half_function` decorates.

    Returns:
        A function with the same signature.

    Example:
        >>> import mpinit
        >>> distance = mpinit.float_function(lambda a, b: (a - b).pow(2).mean())
    """
    return user_wrapper(Cast.FP32, function)


def promote_function(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function: while casts are on, its arguments are cast to the widest floating dtype among them.

    Args:
        function: a function of arguments with several dtypes; float16 and bfloat16 together become float32.

    Returns:
        A function with the same signature.

    Example:
        >>> import torch, mpinit
        >>> mix = mpinit.promote_function(lambda a, b: torch.lerp(a, b, 0.5))
        >>> mix(torch.zeros(4), torch.ones(4)).dtype
        torch.float32
    """
    return user_wrapper(Cast.PROMOTE, function)


def _register(module: Any, name: str, cast: Cast) -> None:
    where = getattr(module, "__name__", repr(module))
    if not isinstance(name, str):
        raise TypeError(f"the name of a function in {where} must be a string, not {name!r}")
    function = INSTALLATION.original(module, name)
    if not callable(function):
        names = [own for own in dir(module) if callable(getattr(module, own, None))]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; dir() lists the names"
        raise ValueError(f"there is no function {name!r} in {where}{hint}")
    # Names bound by an earlier ``from module import name`` call the function without casts.
    found = bound_elsewhere({id(function): name}, module, users_only=False)
    bound = [other for other, _ in found if other.rpartition(".")[0] != where]
    if bound:
        warn_user(
            f"{', '.join(bound[:5])} was imported from {where} before {name!r} was registered and keeps the function "
            f"without casts: register before that import, or call it as {where.rpartition('.')[2]}.{name}"
        )
    REGISTERED[:] = [each for each in REGISTERED if each.owner is not module or each.name != name]
    REGISTERED.append(Registration(module, name, cast))
    INSTALLATION.refresh_registrations()
