"""Resolution of a level, a configuration and keywords into one property set; later ones override earlier ones."""

import contextlib
import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch

from ..basics.dtypes import parse_dtype
from .properties import OPT_LEVELS, Properties, build, field_names, is_override
from .spellings import LARGEST_COUNT, DefaultLevel, parse_bool, parse_whole_number

Config = str | Path | Mapping[str, Any] | None


@dataclass(frozen=True)
class Settings:
    """The keywords of ``initialize`` that are no properties, with their defaults.

    Attributes:
        enabled: False makes this and every other function of mpinit a no-op for these objects. Default True.
        await_optimizers: whether optimizers are added later, by :func:`add_optimizers`. Until then every trainable
            weight keeps its float32 values. Default False.
        num_losses: number of losses that have a scaler each (``loss_id`` of :func:`scale_loss`). Default 1.
        config: a TOML file's path or a mapping with the same keys. Keywords override it, and it overrides the level.
            Default None.
        verbosity: 0: no log lines; 1 and above: one line at level INFO. Default 1.
        process_group: a process group (of ``torch.distributed``) of ranks that step together although they do not share
            gradients: pipeline stages, models sharded over different meshes, gradients that are averaged by hand. All
            of them skip a step if one overflowed. Default None: the ranks over which parameters are sharded, or to
            which DistributedDataParallel leaves some parameters.
    """

    enabled: bool = True
    await_optimizers: bool = False
    num_losses: int = 1
    config: Config = None
    verbosity: int = 1
    process_group: Any = None


_SETTINGS: Final = tuple(field.name for field in fields(Settings))
# All arguments of initialize() that are not properties, for the message about a misspelt argument.
_NO_PROPERTIES: Final = ("models", "optimizers", "opt_level", *_SETTINGS)

# The levels that a dtype in the place of a level probably means.
_LEVELS_OF: Final = {
    torch.float32: "'O0'",
    torch.float16: "'O2' (float16 weights, float32 masters) or 'O1' (float16 functions, float32 weights)",
    torch.bfloat16: "'O5' (bfloat16 weights, float32 masters) or 'O4' (bfloat16 functions, float32 weights)",
}

# Names that other libraries use, and what is written here in their place.
_OF_OTHERS: Final = {
    **dict.fromkeys(
        ("dtype", "torch_dtype", "param_dtype", "model_dtype", "compute_dtype", "precision", "mixed_precision"),
        "cast_model_type, or opt_level='O5' for bfloat16 and opt_level='O2' for float16, both with float32 masters",
    ),
    **dict.fromkeys(("fp16", "half", "float16"), "opt_level='O2'"),
    **dict.fromkeys(("bf16", "bfloat16"), "opt_level='O5'"),
    **dict.fromkeys(("level", "optimization_level"), "opt_level"),
    **dict.fromkeys(("init_scale", "initial_scale", "initial_scale_power"), "init_loss_scale"),
    **dict.fromkeys(("scale_window", "loss_scale_window"), "growth_interval"),
    **dict.fromkeys(("output_dtype", "cast_outputs"), "cast_model_outputs"),
    **dict.fromkeys(("min_scale", "max_scale"), "min_loss_scale and max_loss_scale"),
    **dict.fromkeys(("scale_factor", "loss_scale_factor"), "growth_factor and backoff_factor"),
}

# Settings that a configuration may have too, and their limits. A scaler is made for each loss: making a million takes
# minutes, and is a mistake.
_NUMBERS: Final = {"num_losses": (1, 2**16), "verbosity": (-LARGEST_COUNT, LARGEST_COUNT)}


class ReadConfig(dict[str, Any]):
    """The values of a configuration, with the place that messages name: a file's path, or "config"."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        super().__init__(values)
        self.source = source


def check_level(opt_level: Any) -> str:
    """Return the level's name, or raise a ValueError that lists the levels."""
    if isinstance(opt_level, str) and opt_level in OPT_LEVELS:
        return str(opt_level)
    raise ValueError(
        f"opt_level={opt_level!r} is not a level{_meant_level(opt_level)}; the levels are "
        f"{', '.join(map(repr, OPT_LEVELS))}, the capital letter O and a number"
    )


def _meant_level(value: Any) -> str:
    """Return a hint at the level that a value probably means, or ""."""
    if isinstance(value, bool):
        return ": the third argument of initialize is the level, and enabled=True or enabled=False is a keyword"
    number = re.fullmatch(r"[oO0]?(\d)", str(value).strip())
    if number and f"O{number[1]}" in OPT_LEVELS:
        return f": did you mean 'O{number[1]}'?"
    with contextlib.suppress(ValueError):
        return f": did you mean {_LEVELS_OF[parse_dtype(value)]}?"
    return ""


def check_names(names: Iterable[Any], allowed: tuple[str, ...], where: str, others: tuple[str, ...] = ()) -> None:
    """Refuse the first unknown name, and suggest its replacement or the nearest name."""
    for name in names:
        if name not in allowed:
            if name in _OF_OTHERS:
                raise ValueError(f"{where} has no property {name!r}; use {_OF_OTHERS[name]}")
            near = difflib.get_close_matches(str(name), others + allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f". There are: {', '.join(others + allowed)}"
            raise ValueError(f"{where} has no property {name!r}{hint}")


def read_config(config: Config, extra: tuple[str, ...] = ()) -> ReadConfig:
    """Read a configuration: a TOML file's path, or a mapping."""
    if config is None:
        return ReadConfig({}, "config")
    if isinstance(config, Mapping):
        read = ReadConfig(config, config.source if isinstance(config, ReadConfig) else "config")
    elif isinstance(config, (str, Path)):
        name = f"config file {str(config)!r}"
        read = ReadConfig(_read_toml(Path(config), name), name)
    else:
        raise TypeError(f"config={config!r} is neither a TOML file's path nor a mapping")
    check_names(read, ("opt_level", *field_names(), *extra), read.source)
    return read


def _read_toml(path: Path, name: str) -> dict[str, Any]:
    text = ""
    try:
        # Some editors write a byte order mark before UTF-8 text, which TOML does not allow.
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        reason = f"config file cannot be read: {error.strerror}; use a TOML file's path or a mapping"
        raise OSError(error.errno, reason, str(path)) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text ({error}); save it as UTF-8") from None
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply; properties are plain values and lists of names") from None
    except ValueError as error:  # TOMLDecodeError is one, and so is what a path with a null byte raises
        raise ValueError(f"{name} is not TOML: {error}{_meant_value(text, error)}") from None


def _meant_value(text: str, error: ValueError) -> str:
    """Return a hint where the line that an error names has a bare word as its value, which is no TOML, or ""."""
    at = re.search(r"\(at line (\d+)", str(error))
    line = text.splitlines()[int(at[1]) - 1 :][:1] if at else []
    found = re.fullmatch(r"\s*([\w-]+)\s*=\s*([A-Za-z_][\w.]*)\s*(?:#.*)?", line[0]) if line else None
    if found is None:
        return ""
    name, word = found.groups()
    if word.lower() in ("true", "false"):
        return f"; TOML's booleans are in lower case: {name} = {word.lower()}"
    if word == "None":
        return f'; TOML has no None: delete the line, or write {name} = "None"'
    return f'; a string is in quotes: {name} = "{word}"'


def read_settings(keywords: Mapping[str, Any]) -> tuple[Settings, dict[str, Any], ReadConfig]:
    """Split keywords into settings and properties.

    Returns:
        The settings, the properties among the keywords, and the properties of the configuration.
    """
    rest = {name: value for name, value in keywords.items() if value is not None or name not in _SETTINGS}
    config = rest.pop("config", None)
    from_config = read_config(config, tuple(_NUMBERS))
    for name in _NUMBERS:
        if from_config.get(name, 0) is None:
            del from_config[name]
    enabled, awaits = rest.pop("enabled", True), rest.pop("await_optimizers", False)
    if isinstance(awaits, str):
        with contextlib.suppress(ValueError):
            awaits = parse_bool(awaits)
    if not isinstance(awaits, bool):
        raise TypeError(f"await_optimizers must be True or False, not {awaits!r}")
    # Values from a command line are strings.
    enabled = parse_bool(enabled) if isinstance(enabled, str) else bool(enabled)
    numbers: dict[str, int] = {}
    for name, (smallest, largest) in _NUMBERS.items():
        source = f"{from_config.source}: " if name in from_config and name not in rest else ""
        value = numbers[name] = rest.pop(name, from_config.pop(name, 1))
        if type(value) is int and smallest <= value <= largest:
            continue
        try:
            is_switch = name == "verbosity" and isinstance(value, bool)
            numbers[name] = parse_whole_number(int(value) if is_switch else value, smallest, largest)
        except ValueError as error:
            raise ValueError(f"{source}{name}={error}") from None
    settings = Settings(
        enabled=enabled,
        await_optimizers=awaits,
        num_losses=numbers["num_losses"],
        config=config,
        verbosity=numbers["verbosity"],
        process_group=rest.pop("process_group", None),
    )
    return settings, rest, from_config


def resolve(opt_level: Any, overrides: Mapping[str, Any], config: Config = None) -> tuple[str, Properties]:
    """Resolve a level, a configuration and keyword overrides into one property set.

    Keywords override the configuration, and the configuration overrides the level. None does not override anything.
    The string "None" sets a property that can be None, and else does not override either. If the 16-bit dtype is
    bfloat16 and nothing overrides loss_scale, the level's "dynamic" becomes 1.0: bfloat16 has float32's range.
    """
    from_config = read_config(config)
    level = _level_of(opt_level, from_config)
    check_names(overrides, field_names(), "initialize()", others=_NO_PROPERTIES)
    by_keyword = _only_overrides(overrides)
    chosen = _only_overrides(from_config) | by_keyword
    sources = {name: from_config.source for name in chosen if name not in by_keyword}
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


def _level_of(opt_level: Any, from_config: ReadConfig) -> str:
    config_level = from_config.pop("opt_level", None)
    if config_level is None or not isinstance(opt_level, DefaultLevel):
        return check_level(opt_level)
    try:
        return check_level(config_level)
    except ValueError as error:
        raise ValueError(f"{from_config.source}: {error}") from None


def _only_overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if is_override(name, value)}
