"""The file ``mpinit/settings/keywords.py``, made from the properties and settings for type checkers and editors.

A type checker cannot follow pydantic's validators, which accept more than the field's own type: each value may be None
("not given"), a dtype may be a name, and a list of entries may be one entry. ``AlsoAccepts`` marks all else.
"""

import types
from collections.abc import Callable
from dataclasses import fields
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

Level = Literal[{levels}]
Dtype = torch.dtype | Literal[{dtypes}]
Config = {config}
{aliases}

class Keywords(TypedDict, total=False):
    """The optional arguments of ``initialize``: its settings, and the fields of :class:`Properties`."""

'''


def page() -> str:
    """Return the text of the file."""
    aliases, lines = [], []
    hints = get_type_hints(Settings)
    for field in fields(Settings):
        hint = hints[field.name]
        lines.append(f"    {field.name}: {'Config' if hint == Config else _members(hint)[0]}\n")
    for name, field in Properties.model_fields.items():
        is_list = get_origin(field.annotation) is tuple
        members = _members(get_args(field.annotation)[0] if is_list else field.annotation)
        if is_list:
            if len(members) > 1:
                alias = "_" + name.title().replace("_", "")
                aliases.append(f"{alias} = {' | '.join(members)}\n")
                members = [alias]
            members = [*members, f"Sequence[{members[0]}]"]
        members += [each.type for each in field.metadata if isinstance(each, AlsoAccepts)]
        lines.append(f"    {name}: {' | '.join([*members, 'None'])}\n")
    config = " | ".join([*_members(Config), "None"])
    head = _HEAD.format(levels=_quoted(OPT_LEVELS), dtypes=_quoted(NAMES), config=config, aliases="".join(aliases))
    return head + "".join(lines)


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
