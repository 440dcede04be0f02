"""The page of what other packages do in 16 bits is what was measured; no row is measured here."""

import json
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "docs/elsewhere.py"))
RESULTS: dict[str, Any] = json.loads(SCRIPT["RESULTS"].read_text(encoding="utf-8"))
ROWS = {(title, name): row for title, name, row in SCRIPT["all_rows"]()}


def test_page_is_what_the_results_say() -> None:
    assert SCRIPT["PAGE"].read_text(encoding="utf-8") == SCRIPT["page"](RESULTS), "run: python docs/elsewhere.py --page"


def test_results_and_rows_are_the_same_ones() -> None:
    measured = {(title, name): entry for title, rows in RESULTS["tables"].items() for name, entry in rows.items()}
    assert measured.keys() == ROWS.keys()
    assert {key: entry["packages"] for key, entry in measured.items()} == {key: ROWS[key].packages for key in ROWS}
    assert len([entry for entry in measured.values() if "failed" not in entry["cells"]]) >= 90


def test_versions_of_all_packages_are_pinned() -> None:
    assert all("==" in package for row in ROWS.values() for package in row.packages.split())
    assert all("==" in package for package in SCRIPT["BASE"].split())


def test_no_row_of_o5_is_unlike_float32() -> None:
    """Every optimizer that runs under O5 steps masters to the bits of float32, and resumes as it does in float32."""
    for title in ("Optimizers of torch", "Optimizers of other packages"):
        for name, entry in RESULTS["tables"][title].items():
            cells = entry["cells"]
            if cells.get("moves, O5", "-").endswith("%"):
                assert cells["O5 is float32"] == "yes", name
                ours, _, alone = cells["resumes, O5"].partition("; in float32 alone: ")
                assert ours == "yes" or ours == alone, name
