"""Methods beside forward that users call: found by dotted name, or refused."""

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..basics.logs import warn_user
from ..basics.modules import ModelIndex
from ..basics.tables import nearest
from ..config.plan import KeepInputPredicate


def entry_points(models: Sequence[nn.Module], names: Sequence[str]) -> list[tuple[nn.Module, str]]:
    """Find methods by dotted name, "forward_features" or "backbone.forward_features", in every model; each once.

    ``forward`` of a model itself is not among them, because it is patched anyway.
    """
    found: dict[tuple[nn.Module, str], None] = {}
    for name in names:
        path, _, method = name.rpartition(".")
        owners = [module for module in (_module_at(model, path) for model in models) if module is not None]
        having = [module for module in owners if _is_method(module, method)]
        if not having:
            raise ValueError(_unknown(models, owners, name, method))
        found |= {(module, method): None for module in having if method != "forward" or module not in models}
    return list(found)


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _is_method(module: nn.Module, name: str) -> bool:
    if callable(vars(module).get(name)):
        return True
    found = inspect.getattr_static(type(module), name, None)
    return callable(found) and not isinstance(found, (type, staticmethod, classmethod))


def _unknown(models: Sequence[nn.Module], owners: Sequence[nn.Module], name: str, method: str) -> str:
    if owners and hasattr(owners[0], method):
        return f"entry_points={name!r} is not a method of {type(owners[0]).__name__}: pass names of methods"
    path = name.rpartition(".")[0]
    known = [
        f"{path}.{own}" if path else own for owner in owners for own in sorted({*dir(type(owner))} - {*dir(nn.Module)})
    ]
    parts = [(at, part) for model in models for at, part in model.named_modules() if at]
    known += [f"{at}.{method}" for at, part in parts if _is_method(part, method)]
    kinds = ", ".join(type(model).__name__ for model in models)
    return f"entry_points={name!r} is no method of {kinds}, as 'encode' or 'part.encode'{nearest(name, known)}"


def check_argument_names(index: ModelIndex, methods: Sequence[tuple[nn.Module, str]], patterns: Sequence[Any]) -> None:
    """Refuse names of arguments that no forward or entry point has, and warn of those that resemble others."""
    calls: list[Any] = [model.forward for model in index.models]
    calls += [getattr(module, name) for module, name in methods]
    known = [ArgumentNames(call) for call in calls]
    there_are = list(dict.fromkeys(name for one in known for name in one.all))
    for pattern in (pattern for pattern in patterns if isinstance(pattern, str)):
        if any(fnmatch.filter(one.all, pattern) for one in known):
            continue
        if any(fnmatch.filter(ArgumentNames(part.forward).all, pattern) for part in index.names):
            continue
        if not any(one.accepts_any and pattern != one.keywords for one in known):
            raise ValueError(
                f"keep_inputs={pattern!r} is no argument of forward or of an entry point (to keep a part of one, make "
                f"it a separate argument){nearest(pattern, there_are)}"
            )
        near = difflib.get_close_matches(pattern, there_are, n=1, cutoff=0.75)
        if near:
            warn_user(
                f"keep_inputs={pattern!r} keeps an argument of that name, which forward accepts by "
                f"**{next(one.keywords for one in known if one.accepts_any)}, and casts {near[0]!r}. If that is the "
                f"argument to keep, write keep_inputs={near[0]!r}"
            )


class ArgumentNames:
    """The names of a function's arguments; positional ones have none if it has no signature.

    Attributes:
        all: the names of the arguments that the function names itself.
        accepts_any: whether it accepts arguments of any name.
        keywords: the name of the dict of those, as "kwargs" of ``**kwargs``; "" if there is none.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        rest = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL]
        any_keyword = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD]
        self.all = tuple(parameter.name for parameter in parameters if parameter.name not in any_keyword)
        self.accepts_any = bool(any_keyword) or not parameters
        self.keywords = any_keyword[0] if any_keyword else ""
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = tuple(parameter.name for parameter in parameters if parameter.kind in by_position)
        self._rest = rest[0] if rest else ""

    def named(self, args: tuple[Any, ...]) -> list[tuple[str, Any]]:
        """List the positional arguments of a call with their names."""
        names = self._positional + (self._rest,) * (len(args) - len(self._positional))
        return list(zip(names, args, strict=False))

    def cast(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keep: tuple[KeepInputPredicate, ...],
        cast: Callable[[Any], Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast the arguments of a call, except those that a predicate of ``keep`` accepts."""

        def kept_or_cast(name: str, value: Any) -> Any:
            return value if any(test(name, value) for test in keep) else cast(value)

        positional = [kept_or_cast(name, value) for name, value in self.named(args)]
        return tuple(positional), {name: kept_or_cast(name, value) for name, value in kwargs.items()}
