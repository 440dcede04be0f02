"""Arguments by name, positional ones through the signature of what is called: some of them are to stay as they are."""

import inspect
from collections.abc import Callable
from typing import Any

from ..plan import KeepInputPredicate


class ArgumentNames:
    """What a function's arguments are called; positional ones have no names where it has no signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        rest = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL]
        any_keyword = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD]
        self.all = tuple(parameter.name for parameter in parameters if parameter.name not in any_keyword)
        self.takes_any = bool(any_keyword) or not parameters
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = tuple(parameter.name for parameter in parameters if parameter.kind in by_position)
        self._rest = rest[0] if rest else ""

    def cast(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keep: tuple[KeepInputPredicate, ...],
        cast: Callable[[Any], Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, cast but for those that one of ``keep`` says yes to."""

        def kept_or_cast(name: str, value: Any) -> Any:
            return value if any(test(name, value) for test in keep) else cast(value)

        names = self._positional + (self._rest,) * (len(args) - len(self._positional))
        positional = [kept_or_cast(name, value) for name, value in zip(names, args, strict=False)]
        return tuple(positional), {name: kept_or_cast(name, value) for name, value in kwargs.items()}
