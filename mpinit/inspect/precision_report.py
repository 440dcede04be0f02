"""What :func:`mpinit.explain` found, as rows, text and JSON."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from ..basics.tables import bytes_text, counted, plain_table
from .trace import BACKWARD, FORWARD

# Operations that make another view of the same numbers compute nothing.
_VIEWS: Final = frozenset(
    {
        *("view", "_unsafe_view", "t", "transpose", "expand", "detach", "alias", "slice", "select", "permute"),
        *("squeeze", "unsqueeze", "unbind", "split", "split_with_sizes", "chunk", "as_strided", "unfold", "diagonal"),
        *("_reshape_alias", "view_as_real", "lift_fresh"),
    }
)
_COLUMNS: Final = ("module", "operation", "times", "inputs", "outputs", "cast", "why")
_SHOWN: Final = 60
_FORWARD_ONLY: Final = "Forward only: give loss=, a function of the output, for the backward pass."


@final
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
        why: why it runs in the type it does: policy row, weight type, promotion, user's code.
        where: the file and line of a cast in the user's code; "" elsewhere.
        flagged: whether it ran in 16 bits though the cast policy calls for float32.
        count: how often it ran.
        casts: how many of these were casts of floating numbers.
        cast_bytes: the bytes that those casts wrote.
    """

    module: str
    module_type: str
    phase: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    why: str
    where: str
    flagged: bool
    count: int = 0
    casts: int = 0
    cast_bytes: int = 0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The floating dtypes of inputs and outputs, each once."""
        return tuple(dict.fromkeys((*self.inputs, *self.outputs)))

    @property
    def computes(self) -> bool:
        """Whether it computes floating numbers: a view does not."""
        return bool(self.dtypes) and self.op not in _VIEWS

    def cells(self) -> list[str]:
        """What stands in ``_COLUMNS``."""
        return [
            self.module or f"({self.module_type})",  # the model itself has no dotted name
            self.op if self.phase == FORWARD else f"{self.op} (backward)",
            f"{self.count:,}",
            *(", ".join(dtypes) for dtypes in (self.inputs, self.outputs)),
            bytes_text(self.cast_bytes) if self.casts else "",
            f"{'! ' if self.flagged else ''}{self.why}" + (f" ({Path(self.where).name})" if self.where else ""),
        ]


@final
@dataclass(frozen=True)
class PrecisionReport:
    """What precision does in one run of a model: ``print`` it, or ask for its rows.

    Attributes:
        model: the model's class.
        level: its opt_level; "" where it is not initialised.
        rows: every operation, in the order in which it was first met.
    """

    model: str
    level: str
    rows: tuple[Row, ...]

    @property
    def flagged(self) -> tuple[Row, ...]:
        """Operations that ran in 16 bits though the cast policy calls for float32."""
        return tuple(row for row in self.rows if row.flagged)

    def summary(self) -> str:
        """What was seen, in one line."""
        forward, backward = (sum(row.count for row in self.rows if row.phase == p) for p in (FORWARD, BACKWARD))
        casts = sum(row.casts for row in self.rows)
        size = bytes_text(sum(row.cast_bytes for row in self.rows))
        return (
            f"{counted(forward, 'operation')} forward, {backward:,} backward; "
            f"{counted(casts, 'cast that writes', 'casts that write')} {size}; "
            f"{counted(sum(row.count for row in self.flagged), 'operation')} in 16 bits though the cast "
            "policy calls for float32"
        )

    def __str__(self) -> str:
        title = f"{self.model} {f'at {self.level}' if self.level else 'as it is, not initialised'}"
        rows = [row for row in self.rows if row.computes]
        # What is flagged is shown whatever else there is.
        shown = sorted(range(len(rows)), key=lambda index: not rows[index].flagged)[:_SHOWN]
        hidden = len(rows) - len(shown)
        return "\n".join(
            [
                *(title, self.summary(), ""),
                plain_table(_COLUMNS, (rows[index].cells() for index in sorted(shown)), numbers=(2,)),
                f"{f'{hidden} more rows, ' if hidden else ''}views and operations without floating point: see .rows",
                *(() if any(row.phase == BACKWARD for row in self.rows) else (_FORWARD_ONLY,)),
            ]
        )

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)
