"""Resolution of a level, a configuration and keywords into one set of properties; later ones override earlier ones."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ..basics.tables import nearest
from .loss_scale import RULE_NAMES
from .properties import OPT_LEVELS, Properties, build, is_nothing

Config = str | Path | Mapping[str, Any] | None

PROPERTIES: Final = tuple(Properties.model_fields)
# The arguments of initialize that no level and no configuration sets.
NO_PROPERTIES: Final = ("models", "optimizers", "opt_level", "enabled", "await_optimizers", "process_group", "config")
# Names of other libraries, and what to use in their place.
_ELSEWHERE: Final = {
    **{name: f"use loss_scale=mpinit.DynamicLossScale({field}=...)" for name, field in RULE_NAMES.items()},
    **dict.fromkeys(
        ("dtype", "half_dtype", "torch_dtype", "mixed_precision", "precision", "amp_dtype"),
        "the level sets the dtype (O2: float16, O5: bfloat16), or cast_model_type",
    ),
}


class DefaultLevel(str):
    """A level that the caller did not choose, so that a configuration may replace it."""


DEFAULT_LEVEL: Final = DefaultLevel("O1")


def check_level(opt_level: Any) -> str:
    """Return the level's name, or raise a ValueError that lists the levels."""
    if isinstance(opt_level, str) and opt_level in OPT_LEVELS:
        return str(opt_level)
    hint = "."
    if isinstance(opt_level, bool):
        hint = ": apex's third argument, enabled, is a keyword here."
    elif (near := f"O{str(opt_level)[-1:]}") in OPT_LEVELS:
        hint = f"; did you mean {near!r}?"
    raise ValueError(
        f"opt_level={opt_level!r} is not a level{hint} The levels are {', '.join(map(repr, OPT_LEVELS))}, the capital "
        "letter O and a number"
    )


def check_names(names: Iterable[Any], where: str, also: tuple[str, ...] = ()) -> None:
    """Refuse the first name that is neither a property nor one of ``also``; name what to use, or the nearest.

    Args:
        names: the names that were passed.
        where: the beginning of the message, such as "initialize() has no keyword".
        also: further names that are allowed.
    """
    for name in names:
        if name not in PROPERTIES and name not in also:
            hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else nearest(str(name), (*also, *PROPERTIES))
            raise ValueError(f"{where} {name!r}{hint}")


def read_config(config: Config) -> tuple[dict[str, Any], str]:
    """Read a configuration: a TOML file's path, or a mapping.

    Returns:
        The values, "opt_level" among them; and the place that messages name.
    """
    if config is None:
        return {}, "config"
    if isinstance(config, Mapping):
        values, source = dict(config), "config"
    elif isinstance(config, (str, Path)):
        source = f"config file {str(config)!r}"
        try:
            # Some editors write a byte order mark before UTF-8 text, which TOML does not allow.
            values = tomllib.loads(Path(config).read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:  # of TOML, UTF-8, a path with a null byte; nested too deeply
            hint = 'save it as UTF-8; strings are in quotes, booleans are true and false, and "None" is a string'
            raise ValueError(f"{source} is not TOML: {error}; {hint}") from None
    else:
        raise TypeError(f"config={config!r} is neither a TOML file's path nor a mapping")
    check_names(values, f"{source} has no property", also=("opt_level",))
    return values, source


def resolve(opt_level: Any, overrides: Mapping[str, Any], config: Config = None) -> tuple[str, Properties]:
    """Resolve a level, a configuration and keyword overrides into one set of properties.

    Keywords override the configuration, and the configuration overrides the level. None does not override anything.
    The string "None" sets a property that can be None or empty, and else does not override either. If the 16-bit dtype
    is bfloat16 and nothing overrides loss_scale, the level's "dynamic" becomes 1.0: bfloat16 has float32's range.

    Raises:
        ValueError: an unknown level or property, or values that are not valid or contradict each other.
    """
    from_config, source = read_config(config)
    config_level = from_config.pop("opt_level", None)
    if config_level is None or not isinstance(opt_level, DefaultLevel):
        level = check_level(opt_level)
    else:
        try:
            level = check_level(config_level)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    check_names(overrides, "initialize() has no keyword")
    by_keyword = {name: value for name, value in overrides.items() if is_override(name, value)}
    chosen = {name: value for name, value in from_config.items() if is_override(name, value)} | by_keyword
    sources = {name: source for name in chosen if name not in by_keyword}
    row = OPT_LEVELS[level]
    if not chosen:
        return level, row
    values = {name: getattr(row, name) for name in row.model_fields_set} | chosen
    if "loss_scale" not in chosen and row.loss_scale == "dynamic":
        # Built with 1.0 first: the 16-bit dtype is known only after validation, and validation checks the scale.
        props = build(values | {"loss_scale": 1.0}, sources)
        if props.lower_precision_type is torch.bfloat16:
            return level, props
    return level, build(values, sources)


def is_override(name: str, value: Any) -> bool:
    """Return whether ``value`` sets the property ``name``.

    None never does. The string "None", which a command line may pass, sets a property that can be None, and no other.
    """
    can_be_nothing = Properties.model_fields[name].default in (None, ())
    return value is not None and (can_be_nothing or not is_nothing(value))
