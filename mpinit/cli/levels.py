"""``mpinit levels``: the properties that each level sets."""

import argparse
from typing import Any, Final

from ..basics.tables import plain_table
from ..config.properties import OPT_LEVELS, Properties
from ..config.reading import PROPERTIES, check_names, read_config, resolve

_TABLE: Final = (
    *("cast_model_type", "patch_torch_functions", "patch_torch_functions_type", "keep_batchnorm_fp32"),
    *("master_weights", "loss_scale"),
)


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
    overrides: dict[str, Any] = {}
    for text in arguments.set:
        name, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"--set {text!r} sets nothing; write NAME=VALUE, such as loss_scale=128")
        # Lists of names are separated by commas.
        overrides[name.strip()] = [part.strip() for part in value.split(",")] if "," in value else value
    check_names(overrides, "--set: there is no property")
    config = read_config(arguments.config)[0]
    config.pop("opt_level", None)
    found: dict[str, Properties] = {}
    refused: dict[str, ValueError] = {}
    for level in arguments.levels or OPT_LEVELS:
        try:
            found[level] = resolve(level, overrides, config)[1]
        except ValueError as error:
            refused[level] = error
    if refused and (arguments.levels or not found):
        raise next(iter(refused.values()))
    overridden = {*overrides, *config}
    rows = [
        [f"{name}*" if name in overridden else name, *(_text(name, properties) for properties in found.values())]
        for name in PROPERTIES
        if arguments.levels or name in _TABLE or name in overridden
    ]
    print(f"What the levels set{', with overrides (*)' if overridden else ''}")
    print(plain_table(["property", *found], rows))
    for level, why in refused.items():
        print(f"refused at {level}: {why}")
    return 0


def _text(name: str, properties: Properties) -> str:
    value = getattr(properties, name)
    if name == "patch_torch_functions_type" and not properties.patch_torch_functions:
        value = None  # the property has no effect
    return (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value).removeprefix("torch.")
