"""What one run of a model showed, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..basics.tables import bytes_text, counted, plain_table
from .footprint import KINDS
from .recording import BACKWARD, FORWARD, Key, Tally

# Operations that make another view of the same numbers compute nothing.
VIEWS: Final = frozenset(
    {
        *("view", "_unsafe_view", "t", "transpose", "expand", "detach", "alias", "slice", "select", "permute"),
        *("squeeze", "unsqueeze", "unbind", "split", "split_with_sizes", "chunk", "as_strided", "unfold", "diagonal"),
        *("_reshape_alias", "view_as_real", "lift_fresh"),
    }
)


@dataclass(frozen=True)
class Row:
    """Operations that agree in module, dtypes and reason.

    Attributes:
        module: the module's dotted name; "" is the model itself, "(loss)" what belongs to no module of it.
        module_type: its class.
        phase: "forward" or "backward".
        op: the operation's name in torch's dispatcher, such as "addmm" or "_softmax".
        inputs: the floating dtypes among its inputs, each once, in order.
        outputs: the same of its outputs.
        gradients: of a forward operation, the dtypes of the gradients that its backward returned.
        count: how often it ran.
        casts: how many of these were casts of floating numbers.
        cast_bytes: the bytes that those casts wrote.
        elements: how many numbers were returned.
        why: why it runs in the type it does: policy row, weight type, promotion, user's code.
        where: the file and line of a cast in the user's code; "" elsewhere.
        flagged: whether it ran in 16 bits though the cast policy calls for float32.
    """

    module: str
    module_type: str
    phase: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    count: int
    casts: int
    cast_bytes: int
    elements: int
    why: str
    where: str
    flagged: bool

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The floating dtypes of inputs and outputs, each once."""
        return tuple(dict.fromkeys((*self.inputs, *self.outputs)))


@dataclass(frozen=True)
class Findings:
    """What was seen.

    Attributes:
        model: the model's class.
        level: its opt_level; "" where it is not initialised.
        rows: every operation, in the order in which it was first met.
        bytes_per_parameter: "now" and every level -> "weights", "masters", "gradients", "optimizer state" -> mean
            bytes.
        parameters: how many numbers the parameters hold.
        notes: what a reader has to know besides.
    """

    model: str
    level: str
    rows: tuple[Row, ...]
    bytes_per_parameter: Mapping[str, Mapping[str, float]]
    parameters: int
    notes: tuple[str, ...] = field(default=())

    @property
    def flagged(self) -> tuple[Row, ...]:
        """Operations that ran in 16 bits though the cast policy calls for float32."""
        return tuple(row for row in self.rows if row.flagged)

    @property
    def casts(self) -> tuple[Row, ...]:
        """Casts of floating numbers."""
        return tuple(row for row in self.rows if row.casts)

    def title(self) -> str:
        """What the report is about, in a few words."""
        at = f"at {self.level}" if self.level else "as it is, not initialised"
        return f"{self.model} {at}"

    def summary(self) -> str:
        """What was seen, in one line."""
        forward, backward = (sum(row.count for row in self.rows if row.phase == p) for p in (FORWARD, BACKWARD))
        casts = sum(row.casts for row in self.rows)
        size = bytes_text(sum(row.cast_bytes for row in self.rows))
        return (
            f"{counted(self.parameters, 'parameter')}; {counted(forward, 'operation')} forward, {backward:,} backward; "
            f"{counted(casts, 'cast that writes', 'casts that write')} {size}; "
            f"{counted(sum(row.count for row in self.flagged), 'operation')} in 16 bits though the cast "
            "policy calls for float32"
        )

    def bytes_table(self) -> str:
        """``bytes_per_parameter`` as plain text."""
        body = [
            [level, *(f"{kinds[kind]:.2f}" for kind in KINDS), f"{sum(kinds.values()):.2f}"]
            for level, kinds in self.bytes_per_parameter.items()
        ]
        return plain_table(("level", *KINDS, "together"), body, numbers=range(1, 6))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "model": self.model,
            "level": self.level,
            "parameters": self.parameters,
            "bytes_per_parameter": {level: dict(kinds) for level, kinds in self.bytes_per_parameter.items()},
            "notes": list(self.notes),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    def by_module(self) -> dict[str, list[Row]]:
        """Module -> its rows, in the order in which modules were first met."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.module, []).append(row)
        return found


def rows_of(tallies: Mapping[Key, Tally], types: Mapping[str, str]) -> tuple[Row, ...]:
    """What a recording counted, as rows.

    Args:
        tallies: what was counted.
        types: module -> its class.
    """
    return tuple(_row(key, tally, types) for key, tally in tallies.items())


def _row(key: Key, tally: Tally, types: Mapping[str, str]) -> Row:
    module, phase, op, inputs, outputs, why, where, flagged = key
    return Row(
        module=module,
        module_type=types.get(module, ""),
        phase=phase,
        op=op,
        inputs=inputs,
        outputs=outputs,
        gradients=tuple(tally.gradients),
        count=tally.count,
        casts=tally.casts,
        cast_bytes=tally.cast_bytes,
        elements=tally.elements,
        why=why,
        where=where,
        flagged=flagged,
    )


def name_of(row: Row) -> str:
    """The module as people read it: the model itself has no dotted name."""
    return row.module or f"({row.module_type})"


def joined(dtypes: Iterable[str]) -> str:
    """Names of dtypes, one after the other."""
    return ", ".join(dtypes)
