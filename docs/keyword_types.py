"""The keywords of ``initialize``, made from the tables of settings: their types, signature and descriptions.

``page`` is ``mpinit/settings/keywords.py``, the types. ``initialization`` is ``mpinit/initialization.py``, whose
overloads and list of arguments are written anew, so that editors, ``help()`` and the site show every keyword.

A type checker cannot follow pydantic's validators, which accept more than the field's own type. Each value may be None
("not given"), a dtype may be a name, a number or a switch may be a string of a command line, and a list of entries may
be one entry. ``AlsoAccepts`` marks all else.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import torch

from mpinit.basics.dtypes import NAMES
from mpinit.settings.properties import OPT_LEVELS, AlsoAccepts, Properties
from mpinit.settings.resolve import Config, Settings

_HEAD: Final = '''"""The keywords of ``initialize`` for type checkers and editors, made by docs/generate.py."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import nn

# A command line passes strings: the literals are for editors.
Level = Literal[{levels}] | str
Dtype = torch.dtype | Literal[{dtypes}]
Config = {config}
{aliases}

class Keywords(TypedDict, total=False):
    """The optional arguments of ``initialize``: its settings, and the fields of :class:`Properties`."""

'''


INITIALIZATION: Final = Path(__file__).parents[1] / "mpinit" / "initialization.py"

_OVERLOAD: Final = """\
@overload
def initialize(
    models: Models,
    optimizers: {optimizers},
    opt_level: Level = "O1",
    *,
{keywords}) -> {result}: ...


"""


def keyword_types() -> dict[str, str]:
    """Return the type of each keyword of ``initialize``, as source."""
    hints = get_type_hints(Settings)
    found = {}
    for field in fields(Settings):
        hint = hints[field.name]
        accepted = [*_with_strings(_members(hint)), "None"]
        found[field.name] = "Config" if hint == Config else "Any" if hint is Any else " | ".join(accepted)
    for name, field in Properties.model_fields.items():
        is_list = get_origin(field.annotation) is tuple
        members = _members(get_args(field.annotation)[0] if is_list else field.annotation)
        if is_list:
            kind = _alias_name(name) if len(members) > 1 else members[0]
            members = [kind, f"Sequence[{kind}]"]
        else:
            members = _with_strings(members)
        members += [each.type for each in field.metadata if isinstance(each, AlsoAccepts)]
        found[name] = " | ".join([*members, "None"])
    return found


def defaults() -> dict[str, str]:
    """Return the default of each keyword, as source; None where the level decides."""
    found = {field.name: repr(field.default) for field in fields(Settings) if field.default is not MISSING}
    of_levels = {name for props in OPT_LEVELS.values() for name in props.model_fields_set}
    for name, field in Properties.model_fields.items():
        found[name] = "None" if name in of_levels else _quoted([field.default])
    return found


def page() -> str:
    """Return the text of the file of types."""
    aliases = ""
    for name, field in Properties.model_fields.items():
        if get_origin(field.annotation) is tuple:
            members = _members(get_args(field.annotation)[0])
            aliases += f"{_alias_name(name)} = {' | '.join(members)}\n" if len(members) > 1 else ""
    config = " | ".join([*_members(Config), "None"])
    head = _HEAD.format(levels=_quoted(OPT_LEVELS), dtypes=_quoted(NAMES), config=config, aliases=aliases)
    return head + "".join(f"    {name}: {kind}\n" for name, kind in keyword_types().items())


def initialization() -> str:
    """Return the text of the file of ``initialize``, with its overloads and its list of arguments made anew."""
    text = INITIALIZATION.read_text(encoding="utf-8")
    begin, end = text.index("@overload\n"), text.rindex("def initialize(")
    lines = "".join(f"    {name}: {kind} = {defaults()[name]},\n" for name, kind in keyword_types().items())
    overloads = "".join(
        _OVERLOAD.format(optimizers=optimizers, keywords=lines, result=result)
        for optimizers, result in (("None = None", "Models"), ("Optimizers", "tuple[Models, Optimizers]"))
    )
    text = text[:begin] + overloads + text[end:]
    begin = text.index("        enabled:", text.rindex("def initialize("))
    end = text.index("\n    Returns:", begin)
    described = dict(attributes(Settings)) | dict(attributes(Properties))
    arguments = "".join(
        textwrap.fill(f"{name}: {described[name]}", 120, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"
        for name in keyword_types()
    )
    return text[:begin] + arguments + text[end:]


def attributes(cls: type) -> Iterator[tuple[str, str]]:
    """Yield name and text of the entries under ``Attributes:`` of a class."""
    block = (inspect.getdoc(cls) or "").split("Attributes:")[1].split("Example:")[0]
    for entry in re.split(r"\n {4}(?=\w)", block)[1:]:
        name, _, text = entry.partition(":")
        yield name, " ".join(text.split())


def _alias_name(name: str) -> str:
    return name.title().replace("_", "")


def _with_strings(members: list[str]) -> list[str]:
    """Add the strings that a command line passes: any for a number or a switch, True and False beside other words."""
    if "bool" in members and any(member.startswith("Literal") for member in members):
        return [member.replace("]", ', "True", "False"]') for member in members]
    return [*members, "str"] if {"bool", "int", "float"} & set(members) else members


def _quoted(values: Any) -> str:
    return ", ".join(f'"{value}"' if isinstance(value, str) else repr(value) for value in values)


def _members(kind: Any) -> list[str]:
    """List the members of a union, or the one type, without None, as they are written in source."""
    if get_origin(kind) in (Union, types.UnionType):
        return [text for member in get_args(kind) if member is not type(None) for text in _members(member)]
    return [_text(kind)]


def _text(kind: Any) -> str:
    if kind is torch.dtype:
        return "Dtype"
    if get_origin(kind) is Literal:
        return f"Literal[{_quoted(get_args(kind))}]"
    if get_origin(kind) is Callable:
        arguments, result = get_args(kind)
        return f"Callable[[{', '.join(map(_text, arguments))}], {_text(result)}]"
    if get_origin(kind) is not None:
        origin = get_origin(kind).__name__
        return f"{origin}[{', '.join(map(_text, get_args(kind)))}]"
    if kind is torch.nn.Module:
        return "nn.Module"
    return "Any" if kind is Any else str(kind.__name__)
