"""docs/figures.py makes what the explanations show from runs: the table as it stands, and the picture's numbers."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
FOLDER = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "figures.py"))


def test_the_levels_in_numbers_are_what_a_run_has(figures: dict[str, Any]) -> None:
    page = (FOLDER / "explanation" / "levels.md").read_text(encoding="utf-8")
    assert figures["levels"]() in page, "run: python docs/figures.py"


def test_the_page_shows_what_the_histogram_says(figures: dict[str, Any], tmp_path: Path) -> None:
    page = (FOLDER / "explanation" / "loss-scaling.md").read_text(encoding="utf-8")
    shown = re.search(r"begin -->\n\n```text\n(.*?)\n```\n\n<!-- figures", page, re.S)
    assert shown is not None
    histogram = figures["gradients"](steps=2)
    # Numbers differ from one processor's kernels to another's, and with so few steps; what they are of does not.
    assert re.sub(r"[\d.,]+(e\+\d+)?", "N", str(histogram)) == re.sub(r"[\d.,]+(e\+\d+)?", "N", shown[1])
    count = sum(histogram.bins.values()) + sum(histogram.zeros.values())
    assert f"{count:,} gradients" in shown[1]
    picture = tmp_path / "gradients.png"
    figures["draw"](histogram, picture)
    assert picture.read_bytes()[:4] == (FOLDER / "_static" / "gradients.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("made", "page"),
    [
        ("audited", "how-to/see-precision.md"),
        ("served", "explanation/train-what-you-serve.md"),
        ("skipping", "explanation/loss-scaling.md"),
        ("worth", "explanation/masters.md"),
        ("worth_in_short", "../README.md"),
    ],
)
def test_tables_of_what_was_measured_are_those_of_the_files(made: str, page: str, figures: dict[str, Any]) -> None:
    assert figures[made]().strip() in (FOLDER / page).read_text(encoding="utf-8"), "run: python docs/figures.py"


def test_what_an_audit_foresees_was_compared_with_20_optimizers_at_4_rates() -> None:
    found = json.loads((FOLDER / "measured" / "audit.json").read_text(encoding="utf-8"))
    assert len({(row["optimizer"], row["rate"]) for row in found["rows"]}) == 80
    assert found["mean error"] < 0.02
