"""A precision report as one page: nothing is loaded from elsewhere, narrow or wide, light or dark."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from ..basics.tables import bytes_text
from .findings import VIEWS, Findings, Row, joined, name_of
from .footprint import KINDS
from .page_style import SCRIPT, STYLE
from .recording import BACKWARD, FORWARD

DTYPES: Final = ("float32", "float16", "bfloat16")


def page(report: Findings) -> str:
    """The whole page."""
    parts = [
        f"<h1>{_text(report.title())}</h1>",
        _tiles(report),
        *(f"<p class=note>{_text(note)}</p>" for note in report.notes),
        _flagged(report),
        _memory(report),
        _modules(report),
    ]
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(report.title())}: precision</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + f"\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def notebook_cell(report: Findings) -> str:
    """The page in a frame of its own, so that a notebook's styles and the page's leave each other alone."""
    return (
        f'<iframe title="{_text(report.title())}" srcdoc="{html.escape(page(report))}" '
        'style="width:100%;height:36em;border:0"></iframe>'
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _tiles(report: Findings) -> str:
    counts = {phase: sum(row.count for row in report.rows if row.phase == phase) for phase in (FORWARD, BACKWARD)}
    flagged = sum(row.count for row in report.flagged)
    tiles = [
        ("parameters", f"{report.parameters:,}", ""),
        ("operations forward", f"{counts[FORWARD]:,}", ""),
        ("operations backward", f"{counts[BACKWARD]:,}", ""),
        ("casts", f"{sum(row.casts for row in report.rows):,}", ""),
        ("written by casts", bytes_text(sum(row.cast_bytes for row in report.rows)), ""),
        ("16-bit, policy: float32", f"{flagged:,}", "bad" if flagged else "good"),
    ]
    cells = "".join(
        f"<div class='tile {kind}'><b>{_text(value)}</b><span>{name}</span></div>" for name, value, kind in tiles
    )
    return f"<section class=tiles>{cells}</section>"


def _flagged(report: Findings) -> str:
    head = "<h2>In 16 bits, though the cast policy calls for float32</h2>"
    if not report.flagged:
        return f"<section>{head}<p>Nothing.</p></section>"
    return f"<section>{head}{_table(report.flagged, with_module=True)}</section>"


def _memory(report: Findings) -> str:
    largest = max((sum(kinds.values()) for kinds in report.bytes_per_parameter.values()), default=0.0) or 1.0
    lines = []
    for level, kinds in report.bytes_per_parameter.items():
        pieces = "".join(
            f"<i class=k{index} style='width:{100 * kinds[kind] / largest:.3f}%' "
            f"title='{kind}: {kinds[kind]:.2f} bytes'><span>{kinds[kind]:.3g}</span></i>"
            for index, kind in enumerate(KINDS)
            if kinds[kind] > 0
        )
        here = " class=here" if level in ("now", report.level) else ""
        lines.append(
            f"<tr{here}><th>{level}</th><td class=bar>{pieces}</td><td class=n>{sum(kinds.values()):.2f}</td></tr>"
        )
    legend = "".join(f"<span><i class=k{index}></i>{kind}</span>" for index, kind in enumerate(KINDS))
    return (
        "<section><h2>Bytes a parameter</h2>"
        f"<p class=legend>{legend}</p><table class=bars>{''.join(lines)}</table></section>"
    )


def _modules(report: Findings) -> str:
    legend = "".join(f"<span><i class={dtype}></i>{dtype}</span>" for dtype in DTYPES)
    parts = [_module(rows) for rows in report.by_module().values()]
    return (
        "<section><h2>Modules</h2><div class=tools>"
        "<input id=find type=search placeholder='module, operation or reason' aria-label='Filter'>"
        "<label><input id=views type=checkbox> views and integers</label>"
        "<button id=open type=button>Open all</button></div>"
        f"<p class=legend>{legend}<span><i class=mixed></i>casts and mixed</span></p>{''.join(parts)}</section>"
    )


def _module(rows: Sequence[Row]) -> str:
    first = rows[0]
    shown = [row for row in rows if row.dtypes and row.op not in VIEWS]
    total = sum(row.count for row in shown) or 1
    shares = {dtype: sum(row.count for row in shown if row.dtypes == (dtype,)) for dtype in DTYPES}
    shares["mixed"] = sum(row.count for row in shown) - sum(shares.values())
    bar = "".join(
        f"<i class={name} style='width:{100 * count / total:.2f}%' title='{name}: {count}'></i>"
        for name, count in shares.items()
        if count
    )
    casts = sum(row.cast_bytes for row in rows)
    flagged = sum(row.count for row in rows if row.flagged)
    badges = (f"<em>{bytes_text(casts)} cast</em>" if casts else "") + (
        f"<em class=bad>{flagged} flagged</em>" if flagged else ""
    )
    kind = f" <small>{_text(first.module_type)}</small>" if first.module and first.module_type else ""
    return (
        f"<details><summary><span class=name>{_text(name_of(first))}{kind}</span><span class=share>{bar}</span>"
        f"<span class=badges>{badges}<em>{sum(row.count for row in rows):,} ops</em></span></summary>"
        f"{_table(rows)}</details>"
    )


def _table(rows: Iterable[Row], with_module: bool = False) -> str:
    head = (["module"] if with_module else []) + ["operation", "times", "inputs", "outputs", "gradients", "cast", "why"]
    lines = []
    for row in rows:
        where = f" <small title='{_text(row.where)}'>{_text(Path(row.where).name)}</small>" if row.where else ""
        back = " <small>backward</small>" if row.phase == BACKWARD else ""
        cells = ([_text(name_of(row))] if with_module else []) + [
            f"<code>{_text(row.op)}</code>{back}",
            f"{row.count:,}",
            _dtypes(row.inputs),
            _dtypes(row.outputs),
            _dtypes(row.gradients),
            bytes_text(row.cast_bytes) if row.casts else "",
            f"{_text(row.why)}{where}",
        ]
        quiet = " class=quiet" if not row.dtypes or row.op in VIEWS else " class=flagged" if row.flagged else ""
        body = "".join(f"<td data-l='{name}'>{cell}</td>" for name, cell in zip(head, cells, strict=True))
        lines.append(f"<tr{quiet}>{body}</tr>")
    titles = "".join(f"<th>{name}</th>" for name in head)
    head_row, body_rows = f"<thead><tr>{titles}</tr></thead>", f"<tbody>{''.join(lines)}</tbody>"
    return f"<div class=scroll><table class=ops>{head_row}{body_rows}</table></div>"


def _dtypes(dtypes: tuple[str, ...]) -> str:
    return " ".join(f"<span class='d {dtype}'>{dtype}</span>" for dtype in dtypes) if dtypes else joined(dtypes)
