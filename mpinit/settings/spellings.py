"""Parsers of values from Python, a TOML file or a command line, which passes strings only.

Each function converts all accepted spellings to one value, and refuses the rest with a list of the accepted ones.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import torch

from ..basics.dtypes import dtype_name, parse_dtype
from .recipes import check_recipe

# A scale and its reciprocal are float32 numbers. Outside these limits one of them is 0 or inf.
SMALLEST_SCALE: Final = 2.0**-126
LARGEST_SCALE: Final = 2.0**126
# Counters on the device are int32.
LARGEST_COUNT: Final = 2**31 - 1

DEFAULT_INIT_SCALE: Final = 2.0**16
DEFAULT_MAX_SCALE: Final = 2.0**24

OptimizerStateName = Literal["float32", "bfloat16", "int8"]
OPTIMIZER_STATES: Final = get_args(OptimizerStateName)

_NOTHING: Final = ("none", "")
_BOOLEANS: Final = {"true": True, "false": False}


class DefaultLevel(str):
    """A level that the caller did not choose, so that a configuration may replace it."""


DEFAULT_LEVEL: Final = DefaultLevel("O1")


def is_nothing(value: Any) -> bool:
    """Return whether ``value`` is None, or the string that a command line passes for it."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _NOTHING)


def parse_bool(value: Any) -> bool:
    """Parse a boolean, or the string that a command line passes for one: "True", "false"."""
    if isinstance(value, str) and value.strip().lower() in _BOOLEANS:
        return _BOOLEANS[value.strip().lower()]
    if isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is not a boolean; use True or False (the strings 'True' and 'False' work too)")


def parse_whole_number(value: Any, smallest: int = 0, largest: int = LARGEST_COUNT) -> int:
    """Parse a value of any type that is exactly a whole number; refuse a boolean."""
    try:
        number = int(value)
        # Compared without a conversion to float, which would round a large number.
        exact = not isinstance(value, bool) and (isinstance(value, str) or bool(number == value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        exact = False
    if not exact:
        raise ValueError(f"{value!r} is not a whole number; use one such as {max(smallest, 1)}")
    if not smallest <= number <= largest:
        raise ValueError(f"{value!r} is out of range; use a whole number between {smallest} and {largest}")
    return number


def parse_optional_dtype(value: Any) -> torch.dtype | None:
    """Parse a floating dtype, or nothing (None, False)."""
    if is_nothing(value) or value is False or (isinstance(value, str) and value.strip().lower() == "false"):
        return None
    return parse_dtype(value)


def optional(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a parser that accepts nothing (None) beside the values of another."""
    return lambda value: None if is_nothing(value) else parse(value)


def parse_master_weights(value: Any) -> Any:
    """Parse True, False, nothing, "split" or "model"."""
    if isinstance(value, str) and value in ("split", "model"):
        return value
    try:
        return optional(parse_bool)(value)
    except ValueError as error:
        raise ValueError(f'{value!r} is not a kind of master weights; use True, False, "split" or "model"') from error


def parse_optimizer_state(value: Any) -> str:
    """Parse the name of an encoding of optimizers' states."""
    name = "int8" if value is torch.int8 or value == "int8" else None
    with contextlib.suppress(ValueError):
        name = name or dtype_name(parse_dtype(value))
    if name is None or name not in OPTIMIZER_STATES:
        raise ValueError(
            f"{value!r} is not an encoding of an optimizer's state; use {', '.join(map(repr, OPTIMIZER_STATES[:-1]))} "
            f"or {OPTIMIZER_STATES[-1]!r}"
        )
    return name


def parse_loss_scale(value: Any) -> Any:
    """Parse "dynamic", or a number above 0."""
    if isinstance(value, str) and value == "dynamic":
        return value
    try:
        if isinstance(value, bool):
            raise ValueError
        scale = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(f'{value!r} is not a loss scale; use "dynamic" or a number above 0, such as 128.0') from None
    return check_scale(scale)


def check_scale(scale: float) -> float:
    """Return ``scale``, or raise a ValueError where scaling by it could not be undone in float32."""
    if not math.isfinite(scale) or scale <= 0:
        fault = "is not above 0" if scale <= 0 else "is not finite"
        raise ValueError(f'a loss scale of {scale} {fault}; use "dynamic" or a finite number above 0, such as 128.0')
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ValueError(
            f"a loss scale of {scale} or its reciprocal is out of float32's range; use a number between 2**-126 "
            "and 2**126"
        )
    return scale


def parse_scale(value: Any) -> Any:
    """Parse a number above 0."""
    if is_nothing(value):
        raise ValueError(f"{value!r} is not a number; use one above 0, or omit it for the default")
    if isinstance(value, str) and value == "dynamic":
        raise ValueError('"dynamic" is not a number; only loss_scale can be "dynamic", use a number above 0 here')
    return parse_loss_scale(value)


def _several(value: Any) -> tuple[Any, ...]:
    """Return the entries of a list, of one entry without a list, or of nothing."""
    if is_nothing(value):
        return ()
    if isinstance(value, (set, frozenset)):
        # Ranks compare the entries, and a set has another order in each process.
        return tuple(sorted(value, key=lambda entry: getattr(entry, "__qualname__", str(entry))))
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def parse_keep_fp32(value: Any) -> Any:
    """Parse modules' types, names or predicates, one or several."""
    entries = _several(value)
    for entry in entries:
        check_recipe(entry)
        # pydantic's union would accept these as predicates, because any class and any module can be called.
        if isinstance(entry, torch.nn.Module):
            raise ValueError(
                f"a module itself ({type(entry).__name__}) cannot be an entry; use its dotted name, such as 'head', "
                "its type, or a predicate (name, module) -> bool"
            )
        is_right = issubclass(entry, torch.nn.Module) if isinstance(entry, type) else callable(entry)
        if not (is_right or isinstance(entry, str)):
            raise ValueError(
                f"{entry!r} is neither a torch.nn.Module type, nor a dotted name such as 'head' or '*.norm', nor a "
                "predicate (name, module) -> bool; use one of these, or a list of them"
            )
    return entries


def parse_keep_inputs(value: Any) -> Any:
    """Parse names of arguments or predicates, one or several."""
    entries = _several(value)
    for entry in entries:
        if not (isinstance(entry, str) or (callable(entry) and not isinstance(entry, (type, torch.nn.Module)))):
            raise ValueError(
                f"{entry!r} is neither the name of an argument of forward, such as 'targets', nor a predicate "
                "(name, value) -> bool; use one of these, or a list of them"
            )
    return entries


def parse_entry_points(value: Any) -> Any:
    """Parse names of methods, one or several."""
    entries = _several(value)
    for entry in entries:
        if not isinstance(entry, str) or not all(part.isidentifier() or part.isdigit() for part in entry.split(".")):
            raise ValueError(
                f"{entry!r} is not the name of a method; use names such as 'forward_features', or "
                "'backbone.forward_features' for a module inside, or a list of them"
            )
    return entries
