"""Measure what other packages do in 16 bits, for docs/reference/sixteen-bits-elsewhere.md.

``python docs/elsewhere.py`` measures all rows and writes docs/measured/sixteen-bits-elsewhere.json and the page.
``--only came`` measures the rows with "came" in their name, and compares them with that file. ``--page`` only writes
the page. Each row runs in a process of its own, in a virtual environment with pinned packages. The environments are in
a temporary folder, or in that of ``--folder``, which is kept.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from elsewhere_tables import Row, Table, averages, draws, files, optimizers, scalers, sums  # noqa: E402

RESULTS: Final = ROOT / "docs" / "measured" / "sixteen-bits-elsewhere.json"
PAGE: Final = ROOT / "docs" / "reference" / "sixteen-bits-elsewhere.md"
BASE: Final = "torch==2.13.0 numpy==2.4.6 pydantic==2.14.4"
TABLES: Final[tuple[Table, ...]] = (
    *optimizers.TABLES,
    *averages.TABLES,
    *draws.TABLES,
    *sums.TABLES,
    *files.TABLES,
    *scalers.TABLES,
)
SECONDS: Final = 240
MARK: Final = "measured: "


def all_rows() -> Iterator[tuple[str, str, Row]]:
    """Yield the title of each table with the name and contents of each of its rows."""
    for table in TABLES:
        for name, row in table.rows.items():
            yield table.title, name, row


def _pip(python: Path, packages: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages.split()]
    subprocess.run(command, check=True, capture_output=True, text=True)


def _base(folder: Path) -> Path:
    """Return the Python of the environment that has torch, made if it is missing."""
    python = folder / "torch" / "bin" / "python"
    if not (folder / "torch" / "complete").exists():
        print("installing", BASE, file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / "torch")], check=True)
        _pip(python, BASE)
        (folder / "torch" / "complete").touch()
    return python


def _environment(folder: Path, packages: str, with_torch: bool) -> Path:
    """Return the Python of an environment with these packages, over the one with torch."""
    if with_torch and not packages:
        return _base(folder)
    own = folder / "-".join([*packages.replace("[", "-").replace("]", "").split(), *([] if with_torch else ["alone"])])
    python = own / "bin" / "python"
    if not (own / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(own)], check=True)
        if with_torch:
            site = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
            (own / site / "torch_of_all.pth").write_text(f"{_base(folder).parents[1] / site}\n")
        _pip(python, f"{packages} {BASE}" if with_torch else packages)
        (own / "complete").touch()
    return python


def _first_line(text: str) -> str:
    """Return the line of pip's output that says what failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ([line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"])[0][:200]


def measure_here(rows: list[tuple[str, str]]) -> None:
    """Measure rows in the environment that this process runs in, and print a line for each."""
    found = {(title, name): row for title, name, row in all_rows()}
    if found[rows[0]].torch:
        import torch  # noqa: F401  (once; each row is a fork of this process)
    for key in rows:
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            try:
                cells = dict(found[key].measure())
            except Exception as error:
                cells = {"failed": f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}"[:200]}
            print(MARK + json.dumps([*key, cells]), flush=True)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            print(MARK + json.dumps([*key, {"failed": f"ended with status {status}"}]), flush=True)


def _run(folder: Path, rows: list[tuple[str, str, Row]]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Measure rows that have one environment."""
    names = [(title, name) for title, name, _ in rows]
    try:
        python = _environment(folder, rows[0][2].packages, rows[0][2].torch)
    except subprocess.CalledProcessError as error:
        cells = {"failed": "does not install: " + _first_line(error.stderr)}
        yield from ((title, name, cells) for title, name in names)
        return
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    command = [str(python), __file__, "--measure", json.dumps(names)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **settings}
    ) as process:
        for line in process.stdout or ():
            if line.startswith(MARK):
                title, name, cells = json.loads(line.removeprefix(MARK))
                names.remove((title, name))
                yield title, name, cells
    yield from ((title, name, {"failed": "printed no result"}) for title, name in names)


def measured(folder: Path, only: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Measure the rows whose name or title contains ``only``, and yield title, name and result of each."""
    groups = defaultdict(list)
    for title, name, row in all_rows():
        if only.lower() in f"{title}: {name}".lower():
            groups[row.packages, row.torch].append((title, name, row))
    for (packages, _), rows in groups.items():
        for title, name, cells in _run(folder, rows):
            print(f"{name}: {json.dumps(cells, ensure_ascii=False)}", flush=True)
            yield title, name, {"packages": packages, "date": datetime.date.today().isoformat(), "cells": cells}


def page(results: dict[str, Any]) -> str:
    """Write the page from the results."""
    count = sum(len(rows) for rows in results["tables"].values())
    dates = sorted({entry["date"] for rows in results["tables"].values() for entry in rows.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    parts = [
        "# Sixteen bits elsewhere\n",
        f"What optimizers, averages, initialisers, losses, files and loss scales of others do in 16 bits: {count}\n"
        f"rows, each from a run on a CPU, {when}. `python docs/elsewhere.py --only NAME` runs a row again, and\n"
        "compares it with this page; without `--only` all are run. Versions are pinned; under them are\n"
        f"{results['with']}.\n",
    ]
    for table in TABLES:
        measured = results["tables"].get(table.title, {}).values()
        packages = dict.fromkeys(package for entry in measured for package in entry["packages"].split())
        versions = f"\n\nPackages: {', '.join(packages)}." if packages else ""
        parts.append(f"## {table.title}\n\n{table.text.strip()}{versions}\n")
        rows = {name: results["tables"].get(table.title, {}).get(name) for name in table.rows}
        cells = {name: entry["cells"] for name, entry in rows.items() if entry is not None}
        said, columns = [], []
        for column in table.columns:
            values = Counter(each[column] for each in cells.values() if column in each)
            value, count = values.most_common(1)[0]
            if count < 0.9 * values.total():
                columns.append(column)
                continue
            others = [f"{name}: {each[column]}" for name, each in cells.items() if each.get(column, value) != value]
            but = f", but {'; '.join(others)}" if others else ""
            said.append(f"- *{column}*: {value} in all rows{but}.")
        head = ["what", *columns]
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += [_line(name, columns, each) for name, each in cells.items()]
        if not columns:
            lines = [f"{', '.join(cells)}:"]
        parts.append("\n".join([*lines, "", *said, ""] if said else [*lines, ""]))
    return "\n".join(parts)


def _line(name: str, columns: list[str], cells: dict[str, str]) -> str:
    if "failed" in cells:
        values = [f"not measured: {cells['failed']}", *[""] * (len(columns) - 1)]
    else:
        values = [cells[column] for column in columns]
    if values:  # what is measured, where a column has it
        name = name.removesuffix(f", {values[0].split(' (')[0]}")
    return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in [name, *values]) + " |"


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="NAME", help="rows with this in their name or title; compares, writes nothing"
    )
    parser.add_argument("--write", action="store_true", help="with --only: write the rows into the file and the page")
    parser.add_argument("--page", action="store_true", help="write the page from the file, and measure nothing")
    parser.add_argument(
        "--folder", type=Path, help="where environments are made and kept (default: a temporary folder)"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure_here([(title, name) for title, name in json.loads(options.measure)])
        return 0
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"with": "", "tables": {}}
    if not options.page:
        return _measure(options, results)
    PAGE.write_text(page(results))
    return 0


def _measure(options: argparse.Namespace, results: dict[str, Any]) -> int:
    """Measure rows; compare some with the results, or write all into them and into the page."""
    results["with"] = f"Python {platform.python_version()} and {BASE.split()[0]}"
    count, differing = 0, []
    with tempfile.TemporaryDirectory(prefix="elsewhere-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for title, name, entry in measured(folder, options.only):
            before = results["tables"].get(title, {}).get(name, {}).get("cells")
            count, differing = count + 1, differing + ([f"{name}: {before}"] if before != entry["cells"] else [])
            results["tables"].setdefault(title, {})[name] = entry
            if options.write or not options.only:
                RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
                PAGE.write_text(page(results))
    print(f"{count} rows", *(f"differs from what is recorded for {each}" for each in differing), sep="\n")
    return int(not count or (bool(differing) and not options.write))


if __name__ == "__main__":
    sys.exit(main())
