"""The optimisation levels: one row each, and how a row, a file and keywords resolve into Properties."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from .properties import DEFAULT_MAX_SCALE, Properties, build, check_names, field_names, is_given, parse_bool

_O1: Final[dict[str, Any]] = {"patch_torch_functions": True, "loss_scale": "dynamic"}
_O2: Final[dict[str, Any]] = {
    "cast_model_type": torch.float16,
    "keep_batchnorm_fp32": True,
    "master_weights": True,
    "loss_scale": "dynamic",
}

OPT_LEVELS: Final[Mapping[str, Properties]] = MappingProxyType(
    {
        "O0": Properties(cast_model_type=torch.float32, master_weights=False, loss_scale=1.0),
        "O1": Properties(**_O1),
        "O2": Properties(**_O2),
        "O3": Properties(
            cast_model_type=torch.float16, keep_batchnorm_fp32=False, master_weights=False, loss_scale=1.0
        ),
        "O4": Properties(**_O1 | {"patch_torch_functions_type": torch.bfloat16, "loss_scale": 1.0}),
        "O5": Properties(**_O2 | {"cast_model_type": torch.bfloat16, "loss_scale": 1.0}),
    }
)

# initialize()'s keywords that are no properties: a misspelt one shall find its way home too.
_OTHER_KEYWORDS: Final = ("models", "optimizers", "opt_level", "enabled", "num_losses", "config", "verbosity")

Config = str | Path | Mapping[str, Any] | None


class Default:
    """Marks a value as not chosen by the caller, so that a configuration's may stand in for it, equal or not."""

    __slots__ = ()


class _DefaultStr(str, Default):
    __slots__ = ()


class _DefaultInt(int, Default):
    __slots__ = ()


class _DefaultFloat(float, Default):
    __slots__ = ()


DEFAULT_LEVEL: Final = _DefaultStr("O1")
DEFAULT_ONE: Final = _DefaultInt(1)
DEFAULT_LIMIT: Final = _DefaultFloat(DEFAULT_MAX_SCALE)


def check_level(opt_level: Any) -> str:
    """Return the level's name, or raise a ValueError that lists the levels.

    Example:
        >>> check_level("O2")
        'O2'
    """
    if isinstance(opt_level, str) and opt_level in OPT_LEVELS:
        return str(opt_level)
    raise ValueError(
        f"opt_level={opt_level!r} is not a level: a level is the capital letter O, not the digit zero, followed by "
        f"a number; the levels are {', '.join(map(repr, OPT_LEVELS))}"
    )


def read_config(config: Config, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a configuration: a TOML file's path, or a mapping.

    Args:
        config: path of a TOML file, or a mapping with the same keys, or None for an empty one.
        extra: keys allowed beside the properties' names and "opt_level".

    Returns:
        A new dict of what it holds.

    Raises:
        ValueError: an unknown key (with the nearest name), or a file that is not TOML.
        FileNotFoundError: no such file.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        values, where = dict(config), "config"
    elif isinstance(config, (str, Path)):
        values, where = _read_toml(Path(config)), f"config file {str(config)!r}"
    else:
        raise TypeError(f"config={config!r} is neither a TOML file's path nor a mapping")
    check_names(values, ("opt_level", *field_names(), *extra), where)
    return values


def read_settings(config: Config, num_losses: Any, verbosity: Any) -> dict[str, Any]:
    """Split a configuration into the settings that are no properties, which keywords beat, and the rest.

    Returns:
        "config": what is left of it, "num_losses" and "verbosity": whole numbers.

    Raises:
        ValueError: no whole number, or a number of losses below 1.

    Example:
        >>> read_settings({"num_losses": 2, "loss_scale": 8}, DEFAULT_ONE, "0")
        {'config': {'loss_scale': 8}, 'num_losses': 2, 'verbosity': 0}
    """
    given = {"num_losses": num_losses, "verbosity": verbosity}
    rest = read_config(config, tuple(given))
    for name, value in given.items():
        from_config = rest.pop(name, value)
        given[name] = _whole_number(name, from_config if isinstance(value, Default) else value)
    if given["num_losses"] < 1:
        raise ValueError(f"num_losses={num_losses!r} leaves no loss to scale; give a whole number of at least 1")
    return {"config": rest, **given}


def _whole_number(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool) or int(value) != float(value):
            raise ValueError
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} is not a whole number; give one such as 1") from None


def is_enabled(enabled: Any) -> bool:
    """Whether ``initialize``'s ``enabled`` says yes; "True" and "False" from a command line are understood.

    Example:
        >>> is_enabled("False")
        False
    """
    return parse_bool(enabled) if isinstance(enabled, str) else bool(enabled)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"config file {str(path)!r} is not TOML: {error}") from None


def resolve(opt_level: Any, overrides: Mapping[str, Any], config: Config = None) -> tuple[str, Properties]:
    """Resolve a level, a configuration and keyword overrides into one property set.

    Keywords beat the configuration, and the configuration beats the level. A value of None means "not given"; the
    string "None" means "nothing", or "not given" to a property that must be something. Where the 16-bit type comes
    out as bfloat16 and nobody gave a loss_scale, the level's "dynamic" becomes 1.0: bfloat16 has float32's range.

    Args:
        opt_level: "O0" to "O5".
        overrides: property name -> value, None where not given.
        config: see :func:`read_config`.

    Returns:
        The level's name and the Properties.

    Raises:
        ValueError: an unknown level or name, a bad value, or values that contradict one another.

    Example:
        >>> resolve("O2", {"cast_model_type": "bf16"})[1].loss_scale
        1.0
    """
    from_config = read_config(config)
    config_level = from_config.pop("opt_level", None)
    level = check_level(config_level if isinstance(opt_level, Default) and config_level is not None else opt_level)
    check_names(overrides, field_names(), "initialize()", others=_OTHER_KEYWORDS)
    given = _given(from_config) | _given(overrides)
    row = OPT_LEVELS[level]
    values = {name: getattr(row, name) for name in row.model_fields_set} | given
    props = build(values)
    if "loss_scale" not in given and row.loss_scale == "dynamic" and props.lower_precision_type is torch.bfloat16:
        props = build(values | {"loss_scale": 1.0})
    return level, props


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if is_given(name, value)}
