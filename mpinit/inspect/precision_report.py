"""What :func:`mpinit.explain` found, as rows, text, JSON and a page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from ..basics.tables import bytes_text, plain_table
from .findings import VIEWS, Findings, Row, joined, name_of
from .recording import FORWARD

_SHOWN: Final = 60


@final
@dataclass(frozen=True)
class PrecisionReport(Findings):
    """What precision does in one run of a model: ``print`` it, or ask for a page.

    See :class:`~mpinit.inspect.findings.Findings` for ``rows``, ``flagged``, ``bytes_per_parameter`` and the rest.

    Example:
        >>> import torch, mpinit
        >>> report = mpinit.explain(torch.nn.Linear(4, 2), torch.ones(1, 4), opt_level="O1")
        >>> [(row.op, row.outputs) for row in report.rows if row.op == "addmm"]
        [('addmm', ('float16',))]
        >>> report.bytes_per_parameter["O2"]["masters"]
        4.0
    """

    def __str__(self) -> str:
        rows = [row for row in self.rows if row.op not in VIEWS and row.dtypes]
        # What is flagged is shown whatever else there is.
        shown = sorted(rows, key=lambda row: not row.flagged)[:_SHOWN]
        shown = [row for row in rows if row in shown]
        head = ("module", "op", "count", "inputs", "outputs", "gradients", "cast", "why")
        parts = [self.title(), self.summary(), "", plain_table(head, map(_cells, shown), numbers=(2,))]
        hidden = len(rows) - len(shown)
        parts.append(
            f"{f'{hidden} more rows, ' if hidden else ''}views and operations without floating point: see .rows or "
            ".to_html()"
        )
        parts += ["", "bytes a parameter", self.bytes_table(), *self.notes]
        return "\n".join(parts)

    def to_json(self, path: str | Path | None = None) -> str:
        """Everything as JSON.

        Args:
            path: a file to write it to as well. Default none.

        Returns:
            The text.
        """
        return _written(json.dumps(self.as_dict(), indent=1), path)

    def to_html(self, path: str | Path | None = None) -> str:
        """One page that needs nothing but itself, for a narrow or a wide window, light or dark.

        Args:
            path: a file to write it to as well. Default none.

        Returns:
            The text.
        """
        from .report_page import page

        return _written(page(self), path)

    def _repr_html_(self) -> str:
        from .report_page import notebook_cell

        return notebook_cell(self)


def _cells(row: Row) -> list[str]:
    op = row.op if row.phase == FORWARD else f"{row.op} (backward)"
    where = f" ({Path(row.where).name})" if row.where else ""
    flag = "! " if row.flagged else ""
    return [
        name_of(row),
        op,
        str(row.count),
        joined(row.inputs),
        joined(row.outputs),
        joined(row.gradients),
        bytes_text(row.cast_bytes) if row.casts else "",
        f"{flag}{row.why}{where}",
    ]


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
