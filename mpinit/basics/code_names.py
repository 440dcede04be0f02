"""Names in the code of functions, to guess which attributes they read."""

import dis
import types
from collections.abc import Iterator


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of attributes and globals in code, and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def attributes_of(name: str, code: types.CodeType) -> Iterator[str]:
    """Yield the attributes that code reads of an attribute: "mean" of "norm" in ``self.norm.mean``."""
    before = ""
    for instruction in dis.get_instructions(code):
        is_read = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if is_read and before == name:
            yield instruction.argval
        before = instruction.argval if is_read else ""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from attributes_of(name, constant)
