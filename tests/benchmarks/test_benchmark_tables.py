"""README's and the documentation's benchmark tables are what the committed results say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import charts, tables  # noqa: E402
from benchmarks.comparisons import COMPARISONS  # noqa: E402
from benchmarks.results import Results  # noqa: E402
from benchmarks.suite import workloads  # noqa: E402

FOLDER = tables.machines()[0]


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: str(page.name))
def test_a_page_says_what_the_results_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.replaced(text, FOLDER) == text, "run `make bench-tables`"
    assert "benchmarks" in text and text.count(": begin -->") >= 1


def test_every_block_is_shown_somewhere() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    for name in tables.blocks({}, FOLDER):
        assert f"<!-- benchmarks {name}: begin -->" in shown


@pytest.mark.long
def test_pictures_are_committed_and_can_be_drawn_again(tmp_path: Path) -> None:
    drawn = charts.draw(tables.load(FOLDER), tmp_path)
    assert drawn
    for path in drawn:
        assert path.stat().st_size > 10_000
        assert (FOLDER / path.name).exists()


def test_no_number_is_shown_where_controls_do_not_hold() -> None:
    for results in tables.load(FOLDER).values():
        if results.workload.kind == "training" and not results.is_measurable():
            cells = {tables.relative(results, name, "fp32") for name in results.workload.contenders}
            assert cells <= {tables.NOT_MEASURABLE, "-"}


def test_comparisons_name_workloads_and_contenders_that_exist() -> None:
    rows = workloads("full")
    for comparison in COMPARISONS:
        assert {comparison.above, comparison.below} <= set(rows[comparison.workload].contenders), comparison
        assert comparison.estimate(Results(comparison.workload, rows[comparison.workload])) is None
