"""The outputs of examples/quickstart.ipynb: ``python docs/notebook.py`` runs its cells and writes what they show.

Jupyter is not needed: cells that only print and plot are run one after another in one namespace, as a notebook does.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

PATH: Final = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def read() -> dict[str, Any]:
    """Return the notebook, as JSON."""
    notebook: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return notebook


def execute(notebook: dict[str, Any]) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """Run the code cells in their order.

    Returns:
        Each code cell's outputs, in the notebook's format, and the names that the cells have defined.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = []
    for number, cell in enumerate(code_cells(notebook), start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
            exec(compile("".join(cell["source"]), f"{PATH.name}, cell {number}", "exec"), namespace)
        outputs = []
        if printed.getvalue():
            text = printed.getvalue().splitlines(keepends=True)
            outputs.append({"name": "stdout", "output_type": "stream", "text": text})
        for figure in map(plt.figure, plt.get_fignums()):
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=80, metadata={"Software": None})
            picture = base64.b64encode(file.getvalue()).decode()
            data = {"image/png": picture, "text/plain": ["<Figure>"]}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close("all")
        found.append(outputs)
    return found, namespace


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells that are run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def main() -> int:
    """Run the notebook and write it with its outputs."""
    notebook = read()
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), execute(notebook)[0], strict=True), start=1):
        cell["outputs"], cell["execution_count"] = outputs, number
    PATH.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
