"""``mpinit levels``: the properties that each level sets."""

import argparse
import json
from typing import Any, Final

from ..basics.tables import plain_table
from ..config.properties import OPT_LEVELS, Properties
from ..config.reading import PROPERTIES, check_names, read_config, resolve

_TABLE: Final = (
    "cast_model_type",
    "patch_torch_functions",
    "patch_torch_functions_type",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)
_LISTS: Final = ("keep_fp32", "compute_fp32", "keep_inputs", "entry_points")


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Show what the levels set. Without a level: the main properties of all of them; with one or more: every "
        "property. --set and --config apply to each, as keywords of mpinit.initialize do."
    )
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=f"any of {', '.join(OPT_LEVELS)}")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="override a property, such as loss_scale=128"
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with overrides")


def run(arguments: argparse.Namespace) -> int:
    """Show the table."""
    overrides = dict(_override(text) for text in arguments.set)
    check_names(overrides, "--set: there is no property")
    config = read_config(arguments.config)[0]
    config.pop("opt_level", None)
    chosen = arguments.levels or list(OPT_LEVELS)
    found: dict[str, Properties] = {}
    refused = {}
    for level in chosen:
        try:
            found[level] = resolve(level, overrides, config)[1]
        except ValueError as error:
            if arguments.levels or (level == chosen[-1] and not found):
                raise
            refused[level] = str(error)
    if arguments.json:
        print(json.dumps({level: each.model_dump(mode="json") for level, each in found.items()}, indent=1))
        return 0
    overridden = {name for name in PROPERTIES if name in overrides or name in config}
    shown = [name for name in PROPERTIES if arguments.levels or name in _TABLE or name in overridden]
    columns = len(found) + 1 + bool(arguments.levels)
    rows = [_row(name, found, overridden)[:columns] for name in shown]
    title = "What the levels set" + (", with overrides (*)" if overridden else "")
    print(f"{title}\n{plain_table(['property', *found, 'from'][:columns], rows)}")
    for why in dict.fromkeys(refused.values()):
        print(f"refused at {', '.join(level for level, reason in refused.items() if reason == why)}: {why}")
    return 0


def _override(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"--set {text!r} sets nothing; write NAME=VALUE, such as loss_scale=128")
    name = name.strip()
    return name, [part.strip() for part in value.split(",")] if name in _LISTS else value


def _row(name: str, found: dict[str, Properties], overridden: set[str]) -> list[str]:
    by_level = any(name in OPT_LEVELS[level].model_fields_set for level in found)
    source = "override" if name in overridden else "level" if by_level else "default"
    # Without patched functions the property has no effect.
    unused = name == "patch_torch_functions_type" and name not in overridden
    values = [
        _text(None if unused and not properties.patch_torch_functions else getattr(properties, name))
        for properties in found.values()
    ]
    return [f"{name}*" if name in overridden else name, *values, source]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    return str(value).removeprefix("torch.")
